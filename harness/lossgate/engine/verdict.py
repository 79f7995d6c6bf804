# SPDX-License-Identifier: Apache-2.0
"""What makes a cell AGREE, DISAGREE or INCONCLUSIVE."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from lossgate.adequacy.known_mistakes import NOTHING_ASKED, MistakesShown
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.base.spelling import counted
from lossgate.declaration.candidate import KnownFailure
from lossgate.engine.advice import to_compare, to_detect, to_kill, to_reach
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.failure_files import FrozenCase
from lossgate.engine.own_mistakes import gaps_of
from lossgate.engine.property_result import PropertyResult, reasons_of
from lossgate.engine.survivors import Tried
from lossgate.judge.explain import explain_pooled
from lossgate.judge.pooled_output import Pooled, pool
from lossgate.judge.pooling import FEWEST, LARGEST_MDE

_SHOWN = 4
"""Values of a choice that a line names one by one, and lines about known mistakes."""


def conclude(
    cell: Cell,
    cases: Sequence[CaseResult],
    failure: CaseResult | None,
    shrink_calls: int,
    seconds: float,
    surviving: Mapping[str, OptionMutant] = MappingProxyType({}),
    equivalent: Collection[str] = (),
    untried: Mapping[str, str] = MappingProxyType({}),
    not_distinguished: tuple[str, ...] = (),
    drawn: Mapping[str, int] = MappingProxyType({}),
    tried: Mapping[OptionMutant, Tried] = MappingProxyType({}),
    properties: Sequence[PropertyResult] = (),
    mistakes: MistakesShown = NOTHING_ASKED,
) -> CellResult:
    """Returns the verdict on the cases that were tried.

    Args:
        cell: what was verified.
        cases: the cases that count, in order.
        failure: the smallest case that disagrees, if any.
        shrink_calls: problems that were tried to make it smaller.
        seconds: how long it took.
        surviving: the option mutants that no problem killed.
        equivalent: names of option mutants that no problem can kill.
        untried: the sizes that could not be tried, and why.
        not_distinguished: choices that no problem distinguished, in words. A disagreement ends the
            search before all could be.
        drawn: how many problems were drawn for each coverage goal that was missing.
        tried: what the problems say of the mutants that survive.
        properties: what came of the properties beside that of the cell.
        mistakes: which known mistakes the problems would have shown.
    """
    pooled = _pool(cases)
    covered = frozenset[str]().union(*(case.covered for case in cases))
    own = (*gaps_of(cell.property, [case.said for case in cases]), *(gap for one in properties for gap in one.gaps))
    gaps = (*_gaps(cell, cases, pooled, covered, drawn), *own, *_unseen(mistakes))
    survivors = _survivors(surviving.values(), tried, len(cases))
    verdict, reasons = _verdict(cell, failure, pooled, properties, (*gaps, *_untried(untried), *survivors))
    return CellResult(
        cell=cell,
        verdict=verdict,
        reasons=reasons,
        cases=tuple(cases),
        failure=failure,
        shrink_calls=shrink_calls,
        pooled=pooled,
        properties=tuple(properties),
        covered=covered,
        surviving=tuple(surviving),
        equivalent=tuple(sorted(equivalent)),
        not_distinguished=() if verdict is Verdict.DISAGREE else not_distinguished,
        mistakes=replace(mistakes, surviving=(), too_small=()) if verdict is Verdict.DISAGREE else mistakes,
        gaps=gaps,
        untried=tuple(untried),
        seconds=seconds,
    )


def conclude_known(cell: Cell, known: KnownFailure, frozen: FrozenCase, now: CaseResult, seconds: float) -> CellResult:
    """Returns the verdict on a known failure: expected if the same outputs still disagree."""
    expected = now.symptoms == frozen.symptoms and not now.agrees
    if now.agrees:
        reasons = (
            f"known failure {known.name} is gone: its frozen example agrees now; remove known_failure and verify again",
        )
    elif expected:
        reasons = now.findings
    else:
        was, is_now = " and ".join(frozen.symptoms), " and ".join(now.symptoms)
        changed = f"known failure {known.name} has changed: it was in {was}, and now is in {is_now}; freeze it again"
        reasons = (changed, *now.findings)
    return CellResult(
        cell=cell,
        verdict=Verdict.DISAGREE,
        reasons=reasons,
        cases=(now,),
        failure=None if now.agrees else now,
        pooled=_pool([now]),
        covered=now.covered,
        seconds=seconds,
        expected=expected,
    )


def pooled_disagreements(cases: Sequence[CaseResult]) -> tuple[str, ...]:
    """Returns in words what disagrees only when the problems are pooled."""
    return _biases(_pool(cases))


def pooled_outputs(cases: Sequence[CaseResult]) -> tuple[Pooled, ...]:
    """Returns what the problems say together of each output."""
    return _pool(cases)


def _pool(cases: Sequence[CaseResult]) -> tuple[Pooled, ...]:
    outputs = dict.fromkeys(c.output for case in cases for c in case.comparisons)
    return tuple(
        pool(output, (c for case in cases for c in case.comparisons if c.output == output)) for output in outputs
    )


def _biases(pooled: Iterable[Pooled]) -> tuple[str, ...]:
    return tuple(line for one in pooled for line in explain_pooled(one))


def _verdict(
    cell: Cell,
    failure: CaseResult | None,
    pooled: tuple[Pooled, ...],
    properties: Iterable[PropertyResult],
    gaps: tuple[str, ...],
) -> tuple[Verdict, tuple[str, ...]]:
    if broken := reasons_of(properties):
        return Verdict.DISAGREE, broken
    if failure is not None:
        return Verdict.DISAGREE, failure.reasons
    if biased := _biases(pooled):
        return Verdict.DISAGREE, biased
    return (Verdict.INCONCLUSIVE if gaps else Verdict.AGREE), gaps


def _gaps(
    cell: Cell,
    cases: Sequence[CaseResult],
    pooled: tuple[Pooled, ...],
    covered: frozenset[str],
    drawn: Mapping[str, int],
) -> Iterator[str]:
    """Yields in words what was not seen enough of, beside option mutants that survive."""
    if not any(case.fits for case in cases):
        yield (
            f"property {cell.property} says nothing of any of the {len(cases)} problems that were tried; raise "
            "--examples, or choose other layouts"
        )
    for comparison in (c for case in cases for c in case.comparisons if c.blind):
        yield (
            f"the judge accepted planted errors: {', '.join(comparison.blind)} in {comparison.output}; "
            "please report this fault of lossgate"
        )
    if cell.property.needs_adequacy and len(cases) < FEWEST:
        are = "problem is" if len(cases) == 1 else "problems are"
        yield f"{len(cases)} {are} too few for AGREE; raise --examples to {FEWEST} at least"
    if cell.property.needs_adequacy:
        yield from _hidden_scales(pooled, len(cases))
    for name, goal in cell.required_goals.items():
        if name not in covered:
            tried = drawn.get(name, 0)
            advice = f"{to_reach(tried)}{_way_to(name, cell, tried)}"
            yield f"no problem reached goal {name!r}: {goal.meaning}; {advice}"


def _hidden_scales(pooled: Iterable[Pooled], problems: int) -> Iterator[str]:
    """Yields the outputs whose scale could be wrong, in words."""
    for p in pooled:
        silent = f"in {p.silent} of {problems} problems rounding explains even a result of zero"
        # A metric may be zero on every problem: the share of tokens that are clipped, say.
        if p.silent and (not p.problems or (p.problems < FEWEST and p.output.kind != "metric")):
            yield (
                f"{p.output}: {silent}, and only {p.problems} problems say something about its scale, where "
                f"{FEWEST} are needed; {to_compare(problems, too_noisy=True)}"
            )
        elif not p.problems and p.output.kind != "metric":
            yield (
                f"{p.output}: it was zero in every problem, so that its scale was never compared; "
                f"{to_compare(problems)}"
            )
        elif p.problems and p.mde > LARGEST_MDE:
            yield (
                f"{p.output}: an error of {LARGEST_MDE:.0%} in its scale would not have been detected "
                f"(the least that would is {p.mde:.2g}{f'; {silent}' if p.silent else ''}); {to_detect(p, problems)}"
            )


def _unseen(mistakes: MistakesShown) -> Iterator[str]:
    """Yields a line for each known mistake that would have passed, or for the largest ones."""
    for sentence in mistakes.surviving[: _SHOWN - 1]:
        yield (
            f"a kernel with a known mistake would have passed every problem: {sentence}; try another "
            "--seed, or compute in a finer dtype and declare so"
        )
    if more := len(mistakes.surviving[_SHOWN - 1 :]):
        yield (
            f"{counted(more, 'more known mistake')} would have passed; lossgate report --cell names them, of a run "
            "with --evidence"
        )


def _untried(sizes: Mapping[str, str]) -> Iterator[str]:
    for size, why in sizes.items():
        yield f"size {size} was not tried: {why}"


def _way_to(goal: str, cell: Cell, drawn: int) -> str:
    spec = cell.candidate.spec
    if goal in spec.goals and spec.kinks and cell.dtype != "float32":
        return (
            f". Tokens at which {cell.dtype} decides a clip or comparison are masked: if that keeps it "
            "out of reach, say in dtypes= of the goal where it can be reached, or use a bound without a kink"
        )
    if goal in spec.goals and drawn:
        return ". If supports keeps it out of reach, say so in unreachable_if= of the goal, or support what it needs"
    return ""


def _survivors(mutants: Iterable[OptionMutant], tried: Mapping[OptionMutant, Tried], problems: int) -> Iterator[str]:
    """Yields one line for each choice of an option whose mutants survive."""
    by_choice: dict[str, list[OptionMutant]] = {}
    for mutant in mutants:
        by_choice.setdefault(mutant.choice, []).append(mutant)
    for own in by_choice.values():
        taken_for = (f"{one.other} (in {'a value' if one.side == 'value' else 'a gradient'})" for one in own)
        advice = to_kill([tried[one] for one in own if one in tried], problems, own[0].option)
        choice = f"{own[0].option}={_shortened(own[0].values)}"
        yield f"a kernel that computes {choice} as {', '.join(taken_for)} would have passed every problem; {advice}"


def _shortened(values: Sequence[object]) -> str:
    """Returns the values of a choice in words, of many the first and the last."""
    shown = [*map(str, values)]
    return "/".join(shown if len(shown) <= _SHOWN else [shown[0], "...", shown[-1]])
