# SPDX-License-Identifier: Apache-2.0
"""Runs a problem that failed once more, in a process that has run nothing before.

A kernel may be wrong only after other calls, because it keeps something of them, or only now and
then. Its failure is still one, but whoever replays it should know.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import msgspec

from lossgate.base.spelling import counted
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import CellResult
from lossgate.engine.crash import CRASH, ProcessLost, fresh_child, run_in, run_in_child
from lossgate.engine.verdict import conclude
from lossgate.problems.problem import Problem
from lossgate.worlds.base import Hang

CALLS = 20
"""How often a problem is run in the new process, if its first run there agrees or runs differ."""
_FEW = 8
"""So many calls are left out one by one, to see which of them matter."""
_REPRODUCED = 2
"""From so many tries to make a problem smaller on, one of them has failed again, or the search says
that runs differ."""


def look_again(result: CellResult, timeout: float) -> CellResult:
    """Returns a result that also says what a new process makes of the failure.

    If that agrees, the problems after which it disagrees are looked for. Nothing more is said of a
    failure that the new process shows at once. That of a known failure or a hang, which would cost
    its time-out again, is left alone.
    """
    failure = result.failure
    if failure is None or failure.failure == Hang.__name__ or result.cell.candidate.known_failure is not None:
        return result
    try:
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


def _run_again(result: CellResult, failure: CaseResult, timeout: float) -> list[CaseResult]:
    """Returns what comes of the calls of a new process."""
    cases: list[CaseResult] = []
    with fresh_child(captured=True) as child:
        while len(cases) < CALLS:
            cases += run_in(child, result.cell.held_to(failure.held_to), [failure.problem], timeout)
            if cases[-1].failure == CRASH or (not cases[0].agrees and not failure.unstable):
                break
    return cases


_Found = tuple[str, tuple[Problem, ...]]
"""What a new process makes of a failure in words, and the calls that its replay must make first."""


def _compared(failure: CaseResult, cases: Sequence[CaseResult]) -> _Found | None:
    """Returns what is found if a call of the new process disagreed or crashed; None if there is
    nothing to say, or none did.
    """
    last, wrong = cases[-1], sum(not case.agrees for case in cases)
    if last.failure == CRASH:
        again = failure.failure == CRASH and len(cases) == 1
        return None if again else (f"in call {len(cases)} of a fresh process: {last.findings[0]}", ())
    if not wrong or (not cases[0].agrees and not failure.unstable):
        return None
    often = "not wrong in every call" if wrong < len(cases) else "not wrong in every call before"
    return f"{often}: in a fresh process this problem disagreed in {wrong} of {len(cases)} calls", ()


def _of_agreed(result: CellResult, failure: CaseResult, cases: Sequence[CaseResult], timeout: float) -> _Found | None:
    """Returns what is found if all calls of the new process agreed; None if one did not."""
    if not all(case.agrees for case in cases):
        return None
    agreed = f"in a fresh process this problem agreed in {len(cases)} of {len(cases)} calls"
    if failure.unstable or failure.failure == CRASH or result.run.shrink_calls < _REPRODUCED:
        return f"{agreed}: the candidate is wrong in few calls, or only after certain other calls", ()
    earlier = _calls_before(result, failure, timeout)
    calls = counted(len(earlier), "call")
    after = f"; after {calls} with other problems it disagreed, and its replay makes these first"
    only = f"wrong only after other calls in the same process: {agreed}"
    return f"{only}{after if earlier else ', as its replay will'}", earlier


def _calls_before(result: CellResult, failure: CaseResult, timeout: float) -> tuple[Problem, ...]:
    """Returns as few of the problems that were tried as are found in the time of a time-out, after
    which a problem disagrees in a new process; none if it does not even after all of them.
    """
    tried = [case.problem for case in result.cases]
    cell = result.cell.held_to(failure.held_to)

    def disagrees(earlier: Sequence[Problem]) -> bool:
        *_, last = run_in_child(cell, [*earlier, failure.problem], timeout, captured=True)
        return not last.agrees and last.problem == failure.problem

    if not disagrees(tried):
        return ()
    deadline = monotonic() + timeout
    few, enough, last = 0, tried, 1  # the last ``few`` are too few
    while last < len(tried) and monotonic() < deadline:
        if disagrees(tried[-last:]):
            enough = tried[-last:]
            break
        few, last = last, 2 * last
    while len(enough) - few > 1 and monotonic() < deadline:
        middle = (few + len(enough)) // 2
        few, enough = (few, tried[-middle:]) if disagrees(tried[-middle:]) else (middle, enough)
    for one in enough if len(enough) <= _FEW else ():
        rest = [other for other in enough if other is not one]
        enough = rest if monotonic() < deadline and disagrees(rest) else enough
    return tuple(enough)
