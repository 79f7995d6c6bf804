# SPDX-License-Identifier: Apache-2.0
"""Runs a problem that failed once more, in a process that has run nothing before.

A kernel may be wrong only after other calls, because it keeps something of them, or only now and
then. Its failure is still one, but whoever replays it should know.
"""

from collections.abc import Sequence
from dataclasses import replace

from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import CellResult
from lossgate.engine.crash import CRASH
from lossgate.engine.fresh import fresh_child, run_in
from lossgate.engine.property_result import reasons_of
from lossgate.worlds.base import Hang

CALLS = 20
"""How often a problem is run in the new process, if its first run there agrees or runs differ."""
_REPRODUCED = 2
"""From so many tries to make a problem smaller on, one of them has failed again, or the search says
that runs differ."""


def look_again(result: CellResult, timeout: float) -> CellResult:
    """Returns a result that also tells what a new process makes of the failure.

    It says nothing more of a failure that the new process shows at once. That of a known failure
    or a hang, which would cost its time-out again, is left alone.
    """
    failure = result.failure
    if failure is None or failure.failure == Hang.__name__ or result.cell.candidate.known_failure is not None:
        return result
    with fresh_child() as child:
        cases: list[CaseResult] = []
        while len(cases) < CALLS:
            cases += run_in(child, result.cell.held_to(failure.held_to), [failure.problem], timeout)
            if cases[-1].failure == CRASH or (not cases[0].agrees and not failure.unstable):
                break
    found = _compared(result, failure, cases)
    if not found:
        return result
    findings = (*failure.findings, *found)
    if failure.held_to == result.cell.property.name:
        return replace(result, failure=replace(failure, findings=findings), reasons=findings)
    properties = [replace(one, findings=findings) if one.name == failure.held_to else one for one in result.properties]
    return replace(
        result,
        failure=replace(failure, findings=findings),
        properties=tuple(properties),
        reasons=reasons_of(properties),
    )


def _compared(result: CellResult, failure: CaseResult, cases: Sequence[CaseResult]) -> tuple[str, ...]:
    last, wrong = cases[-1], sum(not case.agrees for case in cases)
    if last.failure == CRASH:
        again = failure.failure == CRASH and len(cases) == 1
        return () if again else (f"in call {len(cases)} of a fresh process: {last.findings[0]}",)
    if not cases[0].agrees and not failure.unstable:
        return ()
    if wrong:
        often = "not wrong in every call" if wrong < len(cases) else "not wrong in every call before"
        return (f"{often}: in a fresh process this problem disagreed in {wrong} of {len(cases)} calls",)
    agreed = f"in a fresh process this problem agreed in {len(cases)} of {len(cases)} calls"
    if failure.unstable or failure.failure == CRASH or result.shrink_calls < _REPRODUCED:
        return (f"{agreed}: the candidate is wrong in few calls, or only after certain other calls",)
    return (f"wrong only after other calls in the same process: {agreed}, as its replay will",)
