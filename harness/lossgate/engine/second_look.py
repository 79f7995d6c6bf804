# SPDX-License-Identifier: Apache-2.0
"""Runs a failing problem once more, in a process that has run nothing before.

A kernel may be wrong only now and then, or only after other calls, because it keeps state. It is
still wrong, but whoever replays the failure should know.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

import msgspec

from lossgate.base.spelling import counted
from lossgate.cases.random_numbers import has_drawn, other_numbers
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.crash import CRASH, ProcessLost, fresh_child, run_in, run_in_child
from lossgate.engine.jobs import run_cases
from lossgate.engine.verdict import conclude
from lossgate.problems.problem import Problem
from lossgate.worlds.base import Hang

CALLS = 20
"""How often a problem is run in the new process, with other random numbers each time. Once is
enough if its first run fails, as it did before, and the kernel draws no random numbers."""
_FEW = 8
"""The most earlier calls that are left out one by one, to see which of them matter."""
_REPRODUCED = 2
"""With at least this many tries to shrink a problem, it has failed again or is called unstable."""


def look_again(result: CellResult, timeout: float, *, here: bool = False) -> CellResult:
    """Returns a result with a further finding about its failure, if a new process adds to it.

    If the problem agrees in the new process, this looks for problems after which it disagrees. A
    failure that the new process shows at once stays as it is. A known failure is not run again, nor
    is a hang, because it would cost its time-out again.

    Args:
        result: the result.
        timeout: seconds that a rank may take.
        here: whether the problem runs in this process, as its cell did. It is then tried with other
            random numbers only.
    """
    failure = result.failure
    if failure is None or failure.failure == Hang.__name__ or result.cell.candidate.known_failure is not None:
        return result
    try:
        if here:
            found = _by_chance(result.cell.held_to(failure.held_to), failure, timeout)
        else:
            cases = _run_again(result, failure, timeout)
            found = _compared(failure, cases) or _of_agreed(result, failure, cases, timeout)
    except ProcessLost as lost:
        found = f"a fresh process could not run this problem again: {lost}", ()
    if found is None:
        return result
    words, earlier = found
    findings = (*failure.findings, words)
    properties = tuple(
        msgspec.structs.replace(one, findings=findings) if one.name == failure.held_to else one
        for one in result.run.properties
    )
    run = replace(result.run, failure=replace(failure, earlier=earlier, findings=findings), properties=properties)
    return replace(conclude(run), printed=result.printed)


def _by_chance(cell: Cell, failure: CaseResult, timeout: float) -> tuple[str, tuple[Problem, ...]] | None:
    """Returns the finding if the failing problem, run in this process, agrees with other random
    numbers.
    """
    wrong = 0
    for series in range(CALLS if has_drawn() else 0):
        with other_numbers(series):
            wrong += not run_cases(cell, [failure.problem], timeout)[0].agrees
    if not 0 < wrong < CALLS:
        return None
    return f"not wrong in every call: with other random numbers this problem disagreed in {wrong} of {CALLS} calls", ()


def _run_again(result: CellResult, failure: CaseResult, timeout: float) -> list[CaseResult]:
    """Runs the failing problem in a new process until there are enough calls to judge it."""
    cell, cases = result.cell.held_to(failure.held_to), list[CaseResult]()
    with fresh_child(captured=True) as child:
        while len(cases) < CALLS:
            cases.append(run_in(child, cell, failure.problem, timeout, len(cases)))
            if cases[-1].failure == CRASH or (_fails_at_once(failure, cases) and not cases[0].draws):
                break
    return cases


_Found = tuple[str, tuple[Problem, ...]]
"""A finding in words, and the problems that a replay must run first."""


def _compared(failure: CaseResult, cases: Sequence[CaseResult]) -> _Found | None:
    """Returns the finding if a call of the new process disagreed or crashed; None if no call did,
    or if that adds nothing to the failure.
    """
    last, wrong = cases[-1], len([case for case in cases if not case.agrees])
    if last.failure == CRASH:
        crashes_at_once = failure.failure == CRASH and len(cases) == 1
        return None if crashes_at_once else (f"in call {len(cases)} of a fresh process: {last.findings[0]}", ())
    if wrong == 0 or (wrong == len(cases) and _fails_at_once(failure, cases)):
        return None
    often = "not wrong in every call" if wrong < len(cases) else "it was not wrong in every call before"
    return f"{often}: in a fresh process this problem disagreed in {wrong} of {len(cases)} calls", ()


def _fails_at_once(failure: CaseResult, cases: Sequence[CaseResult]) -> bool:
    """Returns whether the new process shows the failure in its first call, as the cell did."""
    return not cases[0].agrees and not failure.unstable


def _of_agreed(result: CellResult, failure: CaseResult, cases: Sequence[CaseResult], timeout: float) -> _Found | None:
    """Returns the finding if all calls of the new process agreed; None if one did not."""
    if not all(case.agrees for case in cases):
        return None
    agreed = f"in a fresh process this problem agreed in {len(cases)} of {len(cases)} calls"
    if failure.unstable or failure.failure == CRASH or result.run.shrink_calls < _REPRODUCED:
        return f"{agreed}: the candidate is wrong in few calls, or only after certain other calls", ()
    only = f"wrong only after other calls in the same process: {agreed}"
    earlier = _calls_before(result, failure, timeout)
    if not earlier:
        return f"{only}, and so it will in a replay", ()
    calls = counted(len(earlier), "call")
    return f"{only}; after {calls} with other problems it disagreed, and a replay makes these calls first", earlier


def _calls_before(result: CellResult, failure: CaseResult, timeout: float) -> tuple[Problem, ...]:
    """Returns problems that must run before the failing one for it to disagree in a new process.

    They are as few as a search within ``timeout`` seconds finds. There are none if the problem
    agrees even after all that were tried.
    """
    tried = [case.problem for case in result.cases]
    cell = result.cell.held_to(failure.held_to)

    def disagrees(earlier: Sequence[Problem]) -> bool:
        *_, last = run_in_child(cell, [*earlier, failure.problem], timeout, captured=True)
        return not last.agrees and last.problem == failure.problem

    if not disagrees(tried):
        return ()
    deadline = monotonic() + timeout
    last = _fewest_last(tried, disagrees, deadline)
    return tuple(last if len(last) > _FEW else _without_needless(last, disagrees, deadline))


_Disagrees = Callable[[Sequence[Problem]], bool]
"""Whether the failing problem disagrees after these problems."""


def _fewest_last(tried: Sequence[Problem], disagrees: _Disagrees, deadline: float) -> Sequence[Problem]:
    """Returns as few of the last problems as are enough. It doubles their number, then bisects."""
    too_few, enough, count = 0, len(tried), 1
    while count < enough and monotonic() < deadline:
        if disagrees(tried[-count:]):
            enough = count
        else:
            too_few, count = count, 2 * count
    while enough - too_few > 1 and monotonic() < deadline:
        middle = (too_few + enough) // 2
        if disagrees(tried[-middle:]):
            enough = middle
        else:
            too_few = middle
    return tried[len(tried) - enough :]


def _without_needless(problems: Sequence[Problem], disagrees: _Disagrees, deadline: float) -> Sequence[Problem]:
    """Leaves out problems one by one if the failing problem disagrees without them."""
    kept = problems
    for one in problems:
        rest = [other for other in kept if other is not one]
        if monotonic() < deadline and disagrees(rest):
            kept = rest
    return kept
