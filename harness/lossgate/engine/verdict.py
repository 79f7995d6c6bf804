# SPDX-License-Identifier: Apache-2.0
"""Decides whether a cell is AGREE, DISAGREE or INCONCLUSIVE, and says why."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lossgate.adequacy.known_mistakes import MistakesShown
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.base.spelling import counted, in_a_row
from lossgate.declaration.candidate import KnownFailure
from lossgate.engine.advice import to_compare, to_detect, to_kill, to_reach, to_show_without
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.cell_record import Explained, How, PropertyRecord, Verdict
from lossgate.engine.failure_files import FrozenCase
from lossgate.engine.own_mistakes import gaps_of
from lossgate.engine.recorded import record_of
from lossgate.judge.comparison import Comparison
from lossgate.judge.explain import explain_pooled
from lossgate.judge.pooled_output import Pooled, pool
from lossgate.judge.pooling import FEWEST, LARGEST_MDE
from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import Output

_SHOWN = 4
"""The most values of a choice that a line lists, and the most lines about known mistakes."""

_MUCH_FARTHER = 10
"""The scale over all problems is told if it is so many times farther off than on the smallest."""

_EXPLAINED: Mapping[How, str] = {
    "mended": "broken for this reason alone",
    "same error": "broken by the same error",
    "perhaps": "perhaps broken for the same reason",
}


@dataclass(frozen=True)
class Judged:
    """The verdict on what was run in a cell, and its reasons."""

    pooled: tuple[Pooled, ...]
    """The outputs, each pooled over all problems."""
    verdict: Verdict
    numbers: Verdict
    """The verdict without the further properties."""
    reasons: tuple[str, ...]
    """Why the verdict is not AGREE, in words."""
    gaps: tuple[str, ...] = ()
    """The reasons that more problems may remove, except for option mutants that survive."""


def judge(run: CellRun) -> Judged:
    """Returns the verdict on what was run in a cell."""
    pooled = pooled_outputs(run.cases)
    broken = reasons_of(run.properties)
    if wrong := _wrong(run, pooled):
        return Judged(pooled, Verdict.DISAGREE, Verdict.DISAGREE, (*wrong, *broken))
    of_cases = gaps_of(run.cell.property, [case.said for case in run.cases])
    gaps = (*_gaps(run, pooled), *of_cases, *_unseen(run.mistakes))
    others = (*_untried(run.untried), *_survivors(run))
    numbers = Verdict.INCONCLUSIVE if gaps or others else Verdict.AGREE
    if broken:
        return Judged(pooled, Verdict.DISAGREE, numbers, (*broken, *gaps, *others))
    gaps += tuple(gap for one in run.properties for gap in one.gaps)
    reasons = (*gaps, *others)
    return Judged(pooled, Verdict.INCONCLUSIVE if reasons else Verdict.AGREE, numbers, reasons, gaps)


def conclude(run: CellRun) -> CellResult:
    """Judges what was run in a cell, and returns the result with its record."""
    judged = judge(run)
    fails_in_another = run.failure is not None and run.failure.held_to not in (run.cell.property.name, *_names(run))
    numbers = None if fails_in_another or not run.cell.property.needs_adequacy else judged.numbers
    return CellResult(run=run, record=record_of(run, judged.pooled, judged.verdict, judged.reasons, numbers))


def is_expected(frozen: FrozenCase, now: CaseResult) -> bool:
    """Returns whether a frozen example still disagrees, in the same outputs."""
    return now.symptoms == frozen.symptoms and not now.agrees


def conclude_known(
    cell: Cell,
    known: KnownFailure,
    frozen: FrozenCase,
    now: CaseResult,
    seconds: float,
    *,
    explained: bool = True,
    beside: str = "",
) -> CellResult:
    """Returns the result for a known failure. It is expected if the same outputs still disagree.

    Args:
        cell: the cell of the frozen example.
        known: the known failure.
        frozen: the frozen example, as it was.
        now: the frozen example, as it is now.
        seconds: the time that it took.
        explained: whether the mistake that its file names as the cause still explains it. It is
            expected only then.
        beside: what lies beside the failure, in words; "" if that was not judged.
    """
    expected = is_expected(frozen, now) and explained
    changed = f"known failure {known.name} has changed: "
    if now.agrees:
        reasons = (
            f"known failure {known.name} is gone: its frozen example agrees now; remove known_failure and verify again",
        )
    elif expected:
        reasons = now.findings
    elif not explained:
        reasons = (f"{changed}the cause in its file explains it no more; freeze it again", *now.findings)
    else:
        was, is_now = " and ".join(frozen.symptoms), " and ".join(now.symptoms)
        reasons = (f"{changed}it was in {was}, and now is in {is_now}; freeze it again", *now.findings)
    failure = None if now.agrees else now
    run = CellRun(cell=cell, cases=(now,), failure=failure, seconds=seconds, expected=expected, beside=beside)
    return CellResult(run=run, record=record_of(run, pooled_outputs([now]), Verdict.DISAGREE, reasons))


def conclude_beside(known: KnownFailure, run: CellRun) -> CellResult:
    """Returns the result if something else is wrong than the known failure, which is set aside."""
    reasons = (*judge(run).reasons, beside := f"this is beside known failure {known.name}, which was set aside")
    run = replace(run, beside=beside)
    return CellResult(run=run, record=record_of(run, pooled_outputs(run.cases), Verdict.DISAGREE, reasons))


def pooled_disagreements(pooled: Iterable[Pooled]) -> tuple[str, ...]:
    """Returns, in words, the disagreements that only pooled outputs show."""
    return tuple(line for one in pooled for line in explain_pooled(one))


def pooled_outputs(cases: Sequence[CaseResult]) -> tuple[Pooled, ...]:
    """Pools the comparisons of each output over all problems."""
    by_output: dict[Output, list[Comparison]] = {}
    for case in cases:
        for comparison in case.comparisons:
            by_output.setdefault(comparison.output, []).append(comparison)
    return tuple(pool(output, comparisons) for output, comparisons in by_output.items())


def reasons_of(properties: Iterable[PropertyRecord]) -> tuple[str, ...]:
    """Returns the findings of all properties as reasons against AGREE.

    Each broken property but the first also says on which problem. The problem of the first is
    shown as the failure of the cell. Properties that another one explains are only named.
    """
    lines, broken = list[str](), [held_to for held_to in properties if not held_to.holds]
    for number, one in enumerate(broken):
        if one.explained is not None:
            continue
        lines += one.reasons
        for how, words in _EXPLAINED.items():
            if others := [other.symptom for other in broken if other.explained == Explained(by=one.name, how=how)]:
                lines.append(f"{words}: {in_a_row(others)}")
        if number:
            lines.append(f"{one.symptom}: on {one.on}")
    return tuple(lines)


def _names(run: CellRun) -> Iterator[str]:
    return (one.name for one in run.properties)


def _wrong(run: CellRun, pooled: Iterable[Pooled]) -> tuple[str, ...]:
    """Returns, in words, what is wrong beside the further properties. It is empty if nothing is."""
    if run.failure is not None and run.failure.held_to not in _names(run):
        return (*run.failure.reasons, *_larger_in_all(run.failure, pooled))
    return pooled_disagreements(pooled)


def _larger_in_all(failure: CaseResult, pooled: Iterable[Pooled]) -> Iterator[str]:
    """Yields a line for the output that is farthest off over all problems, if its scale on the
    smallest problem is much nearer to the reference.
    """
    shown = {comparison.output: abs(comparison.values.get(SCALE, 0.0)) for comparison in failure.comparisons}
    more = [
        one
        for one in pooled
        if one.output in shown
        and one.problems > 1
        and not one.scale_agrees
        and abs(one.scale) > _MUCH_FARTHER * shown[one.output]
    ]
    if more:
        one = max(more, key=lambda one: abs(one.scale))
        yield (
            f"{one.output}: {1 + one.scale:.4g} times the reference over {counted(one.problems, 'problem')}; the "
            "smallest problem shows less"
        )


def _gaps(run: CellRun, pooled: Sequence[Pooled]) -> Iterator[str]:
    """Yields, in words, what the problems failed to show."""
    cell, cases = run.cell, run.cases
    if not any(case.fits for case in cases):
        yield (
            f"none of the {len(cases)} problems that were tried says anything about property {cell.property}; raise "
            "--examples, or choose other layouts"
        )
    for comparison in (c for case in cases for c in case.comparisons if c.blind):
        yield (
            f"the judge accepted planted errors: {', '.join(comparison.blind)} in {comparison.output}; "
            "please report this fault of lossgate"
        )
    if cell.property.needs_adequacy:
        if (count := sum(case.fits for case in cases)) < FEWEST:
            are = "problem is" if count == 1 else "problems are"
            yield f"{count} {are} too few for AGREE; raise --examples to {FEWEST} at least"
        yield from _hidden_scales(pooled, len(cases))
    covered = frozenset[str]().union(*(case.covered for case in cases))
    for name, goal in cell.required_goals.items():
        if name not in covered:
            tried = run.drawn.get(name, 0)
            advice = f"{to_reach(tried)}{_way_to(name, cell, tried)}"
            yield f"no problem reached goal {name!r}: {goal.meaning}; {advice}"


def _hidden_scales(pooled: Iterable[Pooled], problems: int) -> Iterator[str]:
    """Yields a line for each output whose scale may be wrong without a problem showing it."""
    for p in pooled:
        silent = f"in {p.silent} of {problems} problems rounding explains even a result of zero"
        # A metric may be zero on every problem, such as the share of tokens that are clipped.
        is_metric, never_compared = p.output.kind == "metric", not p.problems
        too_few = never_compared or (p.problems < FEWEST and not is_metric)
        if p.silent and too_few:
            yield (
                f"{p.output}: {silent}, and only {p.problems} problems say something about its scale, but "
                f"{FEWEST} are needed; {to_compare(problems, too_noisy=True)}"
            )
        elif never_compared and not is_metric:
            yield f"{p.output}: it was zero in every problem, so its scale was never compared; {to_compare(problems)}"
        elif not never_compared and p.mde > LARGEST_MDE:
            also = f"; {silent}" if p.silent else ""
            yield (
                f"{p.output}: an error of {LARGEST_MDE:.0%} in its scale would not have been detected "
                f"(the smallest that would is {p.mde:.2g}{also}); {to_detect(p, problems)}"
            )


def _unseen(mistakes: MistakesShown) -> Iterator[str]:
    """Yields a line for each of the largest known mistakes that would have passed, and one that
    counts the rest.
    """
    for sentence in mistakes.surviving[: _SHOWN - 1]:
        yield (
            f"a kernel with a known mistake would have passed every problem: {sentence}; try another "
            "--seed, or compute in a finer dtype and declare so"
        )
    if more := len(mistakes.surviving[_SHOWN - 1 :]):
        yield (
            f"{counted(more, 'more known mistake')} would have passed; verify with --evidence, and lossgate report "
            "--cell lists them"
        )


def _untried(sizes: Mapping[str, str]) -> Iterator[str]:
    for size, why in sizes.items():
        yield f"size {size} was not tried: {why}"


def _way_to(goal: str, cell: Cell, drawn: int) -> str:
    """Returns further advice on a goal that the spec itself sets; "" if there is none."""
    spec = cell.candidate.spec
    if goal not in spec.goals:
        return ""
    if spec.kinks and cell.dtype != "float32":
        return (
            f". Tokens at which rounding to {cell.dtype} decides a clip or comparison are masked. If no problem can "
            "reach the goal because of that, list in dtypes= of the goal the dtypes that can, or use a bound without "
            "a kink"
        )
    if drawn:
        return ". If supports keeps it out of reach, say so in unreachable_if= of the goal, or support what it needs"
    return ""


def _survivors(run: CellRun) -> Iterator[str]:
    """Yields one line for each choice of an option whose mutants survive."""
    by_choice: dict[str, list[OptionMutant]] = {}
    for mutant in run.surviving.values():
        by_choice.setdefault(mutant.choice, []).append(mutant)
    for mutants in by_choice.values():
        tried = [run.tried[mutant] for mutant in mutants if mutant in run.tried]
        option, values = mutants[0].option, mutants[0].values
        if any(str(one) in run.hidden_by_exclusions for one in mutants):
            advice = to_show_without(run.cell.candidate.exclusions, option)
        else:
            advice = to_kill(tried, len(run.cases), option)
        taken_for = (f"{one.other} (in {'a value' if one.side == 'value' else 'a gradient'})" for one in mutants)
        yield (
            f"a kernel that computes {option}={_shortened(values)} as {', '.join(taken_for)} would have passed every "
            f"problem; {advice}"
        )


def _shortened(values: Sequence[object]) -> str:
    """Returns the values of a choice in words; if there are many, only the first and the last."""
    words = [str(value) for value in values]
    if len(words) > _SHOWN:
        words = [words[0], "...", words[-1]]
    return "/".join(words)
