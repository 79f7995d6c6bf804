# SPDX-License-Identifier: Apache-2.0
"""Checks that the judge could judge kernels of a spec: problems show every option and reach every
goal, and a dense kernel agrees.

The dense kernel is the reference itself in float32. Its ranks gather the inputs that are split.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lossgate.adequacy.option_mutants import OptionMutant, option_mutants
from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.materialize import materialize
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.spec_check.subject import Finding, Subject, evaluate, same, unlike, values_of
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.spec import Spec

_SETTINGS = Settings(examples=20, rounds=8, shrink_calls=50)


def judged(subject: Subject) -> Iterator[Finding]:
    """Looks for options and goals that no problem shows, and for disagreement, on one rank."""
    spec = subject.spec
    equivalent: dict[str, bool] = {}  # at every head so far
    yield from _invalid_choices(spec)
    for head in spec.inputs:
        result = _run(spec, head, "single")
        if isinstance(result, Finding):
            yield result
            return
        mutants = option_mutants(result.cell.candidate)
        for name in mutants:
            equivalent[name] = equivalent.get(name, True) and name in result.record.equivalent
        yield from _of_result(result, mutants)
    yield from _without_effect(subject, [name for name, everywhere in equivalent.items() if everywhere])


def on_ranks(subject: Subject) -> Iterator[Finding]:
    """Looks for disagreement on ranks that split the batch or the vocabulary."""
    for head in subject.spec.inputs:
        layouts = ["dp=2,cp=2"]
        if HEADS[head].has_logits:
            layouts.append("tp=2")
        for layout in layouts:
            result = _run(subject.spec, head, layout)
            if isinstance(result, Finding):
                yield result
                return
            yield from _disagreement(result)


def _run(spec: Spec, head: str, layout: str) -> CellResult | Finding:
    try:
        return run_cell(Cell(dense_candidate(spec, head), Layout.parse(layout), "float32"), _SETTINGS)
    except UsageError as error:
        return Finding(f"from {head} on {layout}: {error}", "mend what the message names")


def _of_result(result: CellResult, mutants: Mapping[str, OptionMutant]) -> Iterator[Finding]:
    yield from _disagreement(result)
    if result.verdict is Verdict.DISAGREE:
        return
    spec, head = result.cell.candidate.spec, result.cell.candidate.head
    for name in result.record.missing_goals:
        yield Finding(
            f"no problem from {head} reached goal {name!r}: {spec.all_goals[name].meaning}",
            "draw fields or options so that a problem does, mend its reached=, or say with heads=, axes= or "
            "unreachable_if= where it can't be reached",
        )
    for name in result.record.surviving:
        mutant = mutants[name]
        where = "the loss" if mutant.side == "value" else "a gradient"
        yield Finding(
            f"from {head}, no problem tells {mutant.option}={mutant.choice} from {mutant.other} in {where}",
            "give choices that differ more, or draw fields so that the choice matters",
        )
    has_finding = bool(result.record.missing_goals or result.record.surviving)
    if result.verdict is Verdict.INCONCLUSIVE and not has_finding:
        for reason in result.reasons:
            yield Finding(f"from {head}: {reason}", "draw fields and options so that results are rarely 0")


def _disagreement(result: CellResult) -> Iterator[Finding]:
    if result.verdict is not Verdict.DISAGREE:
        return
    where = f"from {result.cell.candidate.head} on {result.cell.layout}"
    yield Finding(
        f"{where}, the reference in float32 disagrees with itself: {'; '.join(result.reasons)}",
        _remedy(result),
        result.failure.problem.describe() if result.failure is not None else "",
    )


def _remedy(result: CellResult) -> str:
    """Returns what to change in a reference that disagrees with itself."""
    if str(result.cell.layout) != "single":
        return (
            "use batch.vocab_size, not vocab_start and vocab_end; give each field the dims by which ranks split it; "
            "and see that parts of ranks add up to the whole"
        )
    if any("finite" in reason for reason in result.reasons):
        return (
            "in float32, small probabilities round to 0, others near 1 round to 1, and exp overflows. Compute in "
            "logarithms, with log_softmax, logsumexp, logaddexp and logsigmoid. Only where the loss itself is "
            "infinite, bound it, as in (1 - p).clamp(min=1e-5), with kinks=True: a bound makes another loss, so "
            "kernels need it, too"
        )
    return (
        "compute so that float32 suffices: differences of large numbers cancel, and exp overflows; "
        "if it compares or clamps values, say kinks=True"
    )


def _invalid_choices(spec: Spec) -> Iterator[Finding]:
    for option in spec.options:
        for choice in option.drawn:
            if spec.with_choice({}, option.name, choice) is None:
                yield Finding(
                    f"option {option.name}={choice!r} is never valid: {spec.conflict({option.name: choice})}",
                    "drop the choice, accept it in __post_init__, or name in option_groups= the options it needs",
                )


def _without_effect(subject: Subject, never: Collection[str]) -> Iterator[Finding]:
    """Yields a finding for each pair of choices that no problem tells apart. An option of which
    that holds for every pair gets a single finding.

    Args:
        subject: the spec and problems.
        never: the names of the option mutants that change neither loss nor gradients at any head.
    """
    pairs: dict[tuple[str, Any, Any], bool] = {}  # whether all mutants of a pair are in ``never``
    for head in subject.spec.inputs:
        for name, mutant in option_mutants(dense_candidate(subject.spec, head)).items():
            one, other = sorted((mutant.values[0], mutant.other), key=repr)
            key = mutant.option, one, other
            pairs[key] = pairs.get(key, True) and name in never
    for option in subject.spec.options:
        own = [pair for pair in pairs if pair[0] == option.name]
        alike = [pair for pair in own if pairs[pair] and not _differ(subject, *pair)]
        has_no_effect = bool(own) and alike == own
        if has_no_effect:
            seen = f"option {option.name!r} changes nothing"
            yield Finding(seen, f"use options.{option.name}, or drop it: kernels could ignore it")
            continue
        for _, one, other in alike:
            seen = f"option {option.name!r}: {one!r} and {other!r} give the same"
            yield Finding(seen, "see whether the reference tells them apart, or drop one: kernels could confuse them")


def _differ(subject: Subject, option: str, one: Any, other: Any) -> bool:
    """Returns whether two choices of an option change a metric, or how fields are drawn."""
    for bound in subject.problems:
        chosen = [subject.spec.with_choice(bound.bound_spec.values, option, choice) for choice in (one, other)]
        both = [subject.spec.bind(values) for values in chosen if values is not None]
        if len(both) == 2 and _unlike(bound, *both):
            return True
    return False


def _unlike(bound: BoundProblem, one: BoundSpec, other: BoundSpec) -> bool:
    """Returns whether the options of two bound specs give other fields or results on a problem."""
    fields = [materialize(bound.problem, options).known for options in (one, other)]
    if any(not same(fields[0][name], fields[1][name]) for name in bound.spec.added):
        return True
    if bound.spec.reference is None:
        return False
    found = [evaluate(options, values_of(bound), bound.batch.known) for options in (one, other)]
    return unlike(*found) != ""
