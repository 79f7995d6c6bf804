# SPDX-License-Identifier: Apache-2.0
"""What makes a cell AGREE, DISAGREE or INCONCLUSIVE."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lossgate.adequacy.known_mistakes import MistakesShown
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.base.spelling import counted
from lossgate.declaration.candidate import KnownFailure
from lossgate.engine.advice import to_compare, to_detect, to_kill, to_reach
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.cell_record import PropertyRecord, Verdict
from lossgate.engine.failure_files import FrozenCase
from lossgate.engine.own_mistakes import gaps_of
from lossgate.engine.recorded import record_of
from lossgate.judge.explain import explain_pooled
from lossgate.judge.pooling import FEWEST, LARGEST_MDE, Pooled, pool

_SHOWN = 4
"""Values of a choice that a line names one by one, and lines about known mistakes."""


@dataclass(frozen=True)
class Judged:
    """What follows from what was run in a cell."""

    pooled: tuple[Pooled, ...]
    """Its outputs over all problems."""
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why the verdict is not AGREE, in words."""
    gaps: tuple[str, ...] = ()
    """Those of the reasons that say what was not seen enough of, beside option mutants that survive
    and sizes that could not be tried."""


def judge(run: CellRun) -> Judged:
    """Returns the verdict on what was run in a cell."""
    pooled = pooled_outputs(run.cases)
    if disagreement := _disagreement(run, pooled):
        return Judged(pooled, Verdict.DISAGREE, disagreement)
    own = gaps_of(run.cell.property, [case.said for case in run.cases])
    of_properties = (gap for one in run.properties for gap in one.gaps)
    gaps = (*_gaps(run, pooled), *own, *of_properties, *_unseen(run.mistakes))
    reasons = (*gaps, *_untried(run.untried), *_survivors(run))
    return Judged(pooled, Verdict.INCONCLUSIVE if reasons else Verdict.AGREE, reasons, gaps)


def conclude(run: CellRun) -> CellResult:
    """Returns what came of a cell: the verdict on what was run, and its record."""
    judged = judge(run)
    return CellResult(run=run, record=record_of(run, judged.pooled, judged.verdict, judged.reasons))


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
    failure = None if now.agrees else now
    run = CellRun(cell=cell, cases=(now,), failure=failure, seconds=seconds, expected=expected)
    return CellResult(run=run, record=record_of(run, pooled_outputs([now]), Verdict.DISAGREE, reasons))


def pooled_disagreements(pooled: Iterable[Pooled]) -> tuple[str, ...]:
    """Returns in words what disagrees only when the problems are pooled."""
    return tuple(line for one in pooled for line in explain_pooled(one))


def pooled_outputs(cases: Sequence[CaseResult]) -> tuple[Pooled, ...]:
    """Returns what the problems say together of each output."""
    outputs = dict.fromkeys(c.output for case in cases for c in case.comparisons)
    return tuple(
        pool(output, (c for case in cases for c in case.comparisons if c.output == output)) for output in outputs
    )


def reasons_of(properties: Iterable[PropertyRecord]) -> tuple[str, ...]:
    """Returns the findings of all properties as reasons against AGREE.

    The failure of a cell is that of the first that is broken. The others say on which problem.
    """
    broken = [held_to for held_to in properties if not held_to.holds]
    return tuple(
        line
        for number, held_to in enumerate(broken)
        for line in (*held_to.reasons, *([f"{held_to.symptom}: on {held_to.on}"] if number else []))
    )


def _disagreement(run: CellRun, pooled: Iterable[Pooled]) -> tuple[str, ...]:
    """Returns in words why a cell disagrees; nothing if it does not."""
    if broken := reasons_of(run.properties):
        return broken
    return pooled_disagreements(pooled) if run.failure is None else run.failure.reasons


def _gaps(run: CellRun, pooled: Sequence[Pooled]) -> Iterator[str]:
    """Yields in words what the problems did not show."""
    cell, cases = run.cell, run.cases
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
    covered = frozenset[str]().union(*(case.covered for case in cases))
    for name, goal in cell.required_goals.items():
        if name not in covered:
            tried = run.drawn.get(name, 0)
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


def _survivors(run: CellRun) -> Iterator[str]:
    """Yields one line for each choice of an option whose mutants survive."""
    by_choice: dict[str, list[OptionMutant]] = {}
    for mutant in run.surviving.values():
        by_choice.setdefault(mutant.choice, []).append(mutant)
    for own in by_choice.values():
        taken_for = (f"{one.other} (in {'a value' if one.side == 'value' else 'a gradient'})" for one in own)
        advice = to_kill([run.tried[one] for one in own if one in run.tried], len(run.cases), own[0].option)
        choice = f"{own[0].option}={_shortened(own[0].values)}"
        yield f"a kernel that computes {choice} as {', '.join(taken_for)} would have passed every problem; {advice}"


def _shortened(values: Sequence[object]) -> str:
    """Returns the values of a choice in words, of many the first and the last."""
    shown = [*map(str, values)]
    return "/".join(shown if len(shown) <= _SHOWN else [shown[0], "...", shown[-1]])
