# SPDX-License-Identifier: Apache-2.0
"""Advice for inconclusive verdicts: how many problems are enough, or what would help instead."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, isfinite
from typing import Any

from lossgate.base.errors import LossgateError, UsageError
from lossgate.base.spelling import in_a_row
from lossgate.cases.case import Case
from lossgate.cases.placement import is_given
from lossgate.diagnosis.coarser_precision import Coarser, in_one_stage, in_several_stages
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell, Tried
from lossgate.judge.pooled_output import Pooled
from lossgate.judge.pooling import LARGEST_MDE, sigmas
from lossgate.problems.problem import Problem
from lossgate.properties import Property
from lossgate.specs.outputs import Output
from lossgate.worlds.base import World

_MOST = 2000
"""The most problems to advise. Nobody waits for a cell with more."""
_FEW = 4
"""The fewest problems from which the noise of a pool can be extrapolated."""
_ENOUGH = 20
"""The number of problems after which more hardly help. What none of 20 shows, fewer than 15% of all
problems show, with a confidence of 95%.
"""
_ROUNDS = 4
"""The number of rounds to advise. The first round draws no problems for what is missing."""


def to_detect(pooled: Pooled, problems: int) -> str:
    """Returns advice on an output if an error in its scale may be too small to be detected.

    The limit has two parts. The noise of the pool falls with the root of the number of problems.
    The rest is rounding that is alike in each result, and does not fall.

    Args:
        pooled: the output, pooled.
        problems: how many were tried, also those that say nothing about the output.
    """
    if pooled.problems < _FEW:
        return f"only {pooled.problems} of {problems} problems say something about it; raise --examples"
    noise = float(sigmas(pooled.problems)) * pooled.sd
    fixed = pooled.limit - noise
    left_for_noise = LARGEST_MDE - fixed
    if left_for_noise > 0:
        needed = problems * ((noise + abs(pooled.scale)) / left_for_noise) ** 2
        if needed <= _MOST:
            return f"raise --examples to about {_rounded_up(needed)}"
    of_gradient = pooled.output.kind == "gradient"
    what = "compute gradients" if of_gradient else f"compute or return {pooled.output}"
    return (
        "more problems hardly help, because of the rounding that Precision declares: "
        f"{what} in a finer dtype, and declare so"
    )


def to_compare(problems: int, *, too_noisy: bool = False) -> str:
    """Returns advice on an output whose scale was not compared.

    Args:
        problems: how many were tried.
        too_noisy: whether rounding explains even a result of zero. Otherwise the output was zero.
    """
    if problems < _ENOUGH:
        return f"raise --examples to {_ENOUGH}"
    if too_noisy:
        return f"more problems than these {problems} hardly help: compute in a finer dtype, and declare so"
    return f"more problems than these {problems} hardly help: support a choice with which it is not zero"


def to_kill(tried: Sequence[Tried], problems: int, option: str) -> str:
    """Returns advice on surviving option mutants of one choice.

    Args:
        tried: for each mutant, how close the problems with the choice came to killing it.
        problems: how many problems were tried.
        option: the name of the option.
    """
    drop = f"or drop {option} from supports"
    farthest = min(tried, key=lambda one: one.closest, default=None)
    if farthest is not None and farthest.problems >= _ENOUGH and farthest.closest < 1:
        return f"{_why_more_hardly_help(farthest)}, {drop}"
    given = farthest.problems if farthest is not None else 0
    # If few problems have the choice, a proportional number of problems has enough of them.
    needed = problems * _ENOUGH / given if 0 < given < _ENOUGH else 4 * problems
    if needed > _MOST:
        return (
            f"none of {problems} problems showed the difference, and more hardly help; support what makes them "
            f"differ, {drop}"
        )
    return f"{given} of {problems} problems have this choice; raise --examples to about {_rounded_up(needed)}, {drop}"


def to_show_without(excluded: Iterable[str], option: str) -> str:
    """Returns advice on surviving mutants that only problems show that the candidate excludes.

    Args:
        excluded: the scenarios and choices that it excludes, such as "reference near".
        option: the name of the option.
    """
    return (
        f"no problem shows the difference without what supports excludes, {in_a_row(sorted(excluded))}: exclude less, "
        f"or drop {option} from supports"
    )


def _why_more_hardly_help(tried: Tried) -> str:
    """Returns why enough problems did not kill a mutant, and what helps instead."""
    if not tried.change:
        return (
            f"the two give the same results in all {tried.problems} problems with this choice; "
            "support values of other options with which they differ"
        )
    explained = f"{tried.least:.2g}" if isfinite(tried.least) else "any difference"
    return (
        f"of {tried.problems} problems with this choice, the one that came closest to showing the difference has a "
        f"difference of {tried.change:.2g}, and rounding explains {explained}. More problems hardly help: "
        "compute in a finer dtype and declare so"
    )


def to_reach(drawn: int) -> str:
    """Returns advice on a coverage goal that no problem reached.

    Args:
        drawn: how many problems were drawn for it, in rounds after the first.
    """
    if not drawn:
        return f"no problem was drawn for it; set rounds to {_ROUNDS} or more"
    return f"none of {drawn:,} problems that were drawn for it reaches it, and more hardly help"


def _rounded_up(count: float) -> int:
    """Rounds a number of problems up to two significant digits."""
    digits = len(str(int(count)))
    step = 10 ** max(0, digits - 2)
    return ceil(count / step) * step


_WITH_ROOM = 0.8
"""The largest share of a limit at which a coarser precision is said to agree. With a larger share,
another run might disagree.
"""


_REMEDIES = {
    "missing": "let backward reach each input: detach none, and where there is nothing to compute, add "
    "0.0 * x.sum() to the loss"
}
"""What to do about a failure, by its manner, whatever the property."""


def with_todo(cell: Cell, case: CaseResult, world: World) -> CaseResult:
    """Adds advice to a case that disagrees.

    A wrong number of agreement gets none, because advice on it depends on the cause.
    """
    if case.agrees or (cell.property.needs_adequacy and case.manner not in _REMEDIES):
        return case
    return replace(case, todo=remedy_of(cell, case, world))


def remedy_of(cell: Cell, failure: CaseResult, world: World) -> str:
    """Returns advice on a property that fails; "" if its findings say what to do.

    A kernel that rounds more than it declares may break any property that compares numbers. The
    property's own advice does not help then, so advice on the declaration comes first.
    """
    if failure.says_what_to_do:
        return ""
    remedy = cell.property.remedies.get(failure.manner) or _REMEDIES.get(failure.manner, cell.property.remedy)
    if convention := _convention_kept(cell, failure, world):
        return f"{remedy}; or, if its callers keep to it, {convention}" if remedy else convention
    change = _coarser_that_agrees(cell, failure, world)
    if change is None:
        return remedy
    declared = change.declared(cell.candidate, cell.dtype)
    first = (
        f"if the kernel rounds {change.rounds} to {change.to}, declare for {cell.dtype} {declared}; with this "
        "declaration, the property holds"
    )
    return f"{first}. If not, {remedy}" if remedy else first


def _convention_kept(cell: Cell, failure: CaseResult, world: World) -> str:
    """Returns advice to declare the strictest convention under which a kernel does what it
    promises; "" if there is none.
    """
    own = cell.candidate.conventions
    for name, choices in cell.property.relaxed_by.items():
        for choice in choices:
            if getattr(own, name) == choice:
                continue
            relaxed = replace(own, **{name: choice})
            candidate = replace(cell.candidate, conventions=relaxed)
            if cell.property.applies(candidate) and not _holds(Case(candidate, failure.problem, world), cell.property):
                continue
            key = f"{name}={choice!r}"
            return f"declare conventions=lossgate.Conventions({key}): {relaxed.declared[key]}"
    return ""


_OF_COUNTS: Sequence[Mapping[str, Any]] = (
    {"counts": "own"},
    {"untrained": "nan"},
    {"counts": "own", "untrained": "nan"},
)
"""Conventions under which other numbers are right, the fewest first."""


def convention_of_numbers(cell: Cell, failing: Sequence[Problem], world: World) -> str:
    """Returns advice to declare the fewest conventions under which failing problems agree, and an
    ordinary one; "" if they agree under none.
    """
    own, group = cell.candidate.conventions, cell.candidate.spec.group_size
    first = failing[0]
    ordinary = replace(
        first,
        lengths=(5,) * group + (3,) * group,
        masks=("all",) * 2 * group,
        vocab=48,  # that splits evenly
        forced_labels=(),
        outliers=(),
    )
    for choices in _OF_COUNTS:
        relaxed = replace(own, **choices)
        if any(getattr(own, name) == choice for name, choice in choices.items()):
            continue
        candidate = replace(cell.candidate, conventions=relaxed)
        cases = [Case(candidate, problem, world) for problem in failing]
        with suppress(UsageError):  # the ordinary problem may be none that the kernel can be given
            cases.append(Case(candidate, ordinary, world))
        if all(_agrees(case, cell.property) for case in cases):
            words = "; and ".join(relaxed.declared[f"{name}={choice!r}"] for name, choice in choices.items())
            given = ", ".join(f"{name}={choice!r}" for name, choice in choices.items())
            return f"declare conventions=lossgate.Conventions({given}): {words}"
    return ""


def _agrees(case: Case, held_to: Property) -> bool:
    """Returns whether a candidate agrees on a problem, or gives NaN as it says where nothing is
    trained.
    """
    again = _tried(case, held_to)
    if again is None or again.agrees:
        return again is not None
    return again.manner == "not finite" and not is_given(case.candidate, case.bound, case.problem.partition)


def _holds(case: Case, held_to: Property) -> bool:
    again = _tried(case, held_to)
    return again is not None and again.fits and again.agrees


def _tried(case: Case, held_to: Property) -> CaseResult | None:
    try:
        return run_case(case, held_to)
    except LossgateError:  # its loss has several counts, or the kernel can't be sent to other processes
        return None


def _coarser_that_agrees(cell: Cell, failure: CaseResult, world: World) -> Coarser | None:
    """Returns the likeliest coarser precision with which a case agrees; None if there is none."""
    wrong = [comparison for comparison in failure.comparisons if not comparison.agrees]
    if cell.dtype == "float32" or failure.faults or not wrong or any(comparison.faults for comparison in wrong):
        return None
    changes = [*in_one_stage(cell.candidate, cell.dtype), *in_several_stages(cell.candidate, cell.dtype)]
    outputs = list(dict.fromkeys(comparison.output for comparison in wrong))
    for change in sorted(changes, key=lambda change: _likeliest_first(change, outputs)):
        if "reduce" in change.changes and cell.layout.tp == 1:
            continue
        again = run_case(Case(change.of(cell.candidate, cell.dtype), failure.problem, world), cell.property)
        if again.fits and again.agrees and max((one.margin for one in again.comparisons), default=0.0) <= _WITH_ROOM:
            return change
    return None


def _likeliest_first(change: Coarser, wrong: Sequence[Output]) -> int:
    """Returns the rank of a change; the likeliest has 0.

    If only the gradient of weight is wrong, the running sum over tokens is likeliest. Next come
    changes of logits, which most kernels round first.
    """
    only_weight = len(wrong) == 1 and wrong[0].kind == "gradient" and wrong[0].name == "weight"
    if only_weight and change.leaf == "weight":
        return 0
    return 1 if change.is_of_logits else 2
