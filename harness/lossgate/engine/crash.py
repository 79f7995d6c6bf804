# SPDX-License-Identifier: Apache-2.0
"""Runs cases in a process that may die.

If the process dies, this decides whether the candidate ended it. If so, the case is a crash.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.child import Child, ChildDied
from lossgate.engine.jobs import CasesJob, CellName
from lossgate.engine.verdict import conclude
from lossgate.problems.problem import Problem
from lossgate.worlds.base import WorldLost

CRASH = "Crash"
"""The name of this kind of failure in evidence and failure files."""


class ProcessLost(WorldLost):
    """The process of a candidate has ended, but its kernel did not end it. So nothing is known
    about the kernel.
    """


def case_of_crash(cell: Cell, died: ChildDied, first: ChildDied | None = None) -> CaseResult:
    """Returns the result of the case in which the kernel ended the process.

    Args:
        cell: the cell.
        died: how the process ended.
        first: how a process before it ended, which something outside may have ended.

    Raises:
        ProcessLost: if the kernel did not end the process.
    """
    # In other worlds the ranks have processes of their own. A crash of the kernel ends only these.
    if died.ran is None or not died.is_by_kernel or cell.world != "simulated":
        raise ProcessLost(f"CRASH: the process that was to run the candidate {died.how}")
    if first is not None and first.ran != died.ran:
        raise ProcessLost(
            f"CRASH: two processes were ended, and not at the same point: the second {died.how}. A kernel that ends "
            "its process does so on the same problem again; see what else takes memory or ends processes"
        )
    held_to = died.ran.held_to
    of = "" if held_to == "agreement" else f"property {held_to}: "
    twice = ", and so was the process before it" if first is not None else ""
    finding = f"{of}CRASH: the process that ran the candidate {died.how}{twice}"
    return CaseResult(problem=died.ran.problem, findings=(finding,), failure=CRASH, held_to=held_to)


def result_of_crash(cell: Cell, died: ChildDied, seconds: float, first: ChildDied | None = None) -> CellResult:
    """Returns the result of a cell whose process died.

    The cell disagrees on the last problem if the kernel ended the process. Otherwise it is
    inconclusive. The arguments are those of ``case_of_crash``.
    """
    try:
        case = case_of_crash(cell, died, first)
    except ProcessLost as lost:
        result = conclude(CellRun(cell=cell, cases=(), seconds=seconds))
        return replace(result, record=msgspec.structs.replace(result.record, reasons=(str(lost), *result.reasons)))
    return conclude(CellRun(cell=cell, cases=(case,), failure=case, seconds=seconds))


@contextmanager
def fresh_child(*, captured: bool = False) -> Generator[Child]:
    """Gives a new process, and ends it afterwards.

    Args:
        captured: whether its output is kept and not shown.
    """
    child = Child(captured=captured)
    try:
        yield child
    finally:
        child.end()


def run_in_child(
    cell: Cell, problems: Sequence[Problem], timeout: float, *, captured: bool = False
) -> list[CaseResult]:
    """Runs problems of a cell one after the other, in a new process.

    If the kernel ends the process, the only result is the crash. If something outside may have
    ended it, the problems are run again, once.

    Raises:
        ProcessLost: if anything else ends the process.
    """
    first: ChildDied | None = None
    while True:
        with fresh_child(captured=captured) as child:
            try:
                return child.run(_job(cell, problems, timeout), timeout)
            except ChildDied as died:
                if first is not None or not died.from_outside:
                    return [case_of_crash(cell, died, first)]
                first = died


def run_in(child: Child, cell: Cell, problem: Problem, timeout: float, series: int) -> CaseResult:
    """Runs a problem of a cell in a process. If the kernel ends the process, the result is the
    crash.

    Args:
        child: the process.
        cell: the cell.
        problem: the problem.
        timeout: seconds that a rank may take.
        series: the series of random numbers from which the kernel draws.

    Raises:
        ProcessLost: if anything else ends the process.
    """
    try:
        return child.run(_job(cell, [problem], timeout, series), timeout)[0]
    except ChildDied as died:
        return case_of_crash(cell, died)


def _job(cell: Cell, problems: Sequence[Problem], timeout: float, series: int = 0) -> CasesJob:
    return CasesJob(CellName.of(cell), (cell.candidate.source,), problems, timeout, series)
