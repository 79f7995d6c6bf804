# SPDX-License-Identifier: Apache-2.0
"""Runs cases in a process that may die, and what is said of the candidate if it does: that it ended
the process, or that something else did.
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
"""The kind of failure, as evidence and failure files name it."""


class ProcessLost(WorldLost):
    """The process in which a candidate was to run has ended, and not by its kernel. Nothing is then
    known of that.
    """


def case_of_crash(cell: Cell, died: ChildDied) -> CaseResult:
    """Returns what came of the case that a process died of.

    Raises:
        ProcessLost: if it did not die of the kernel.
    """
    # Ranks of other worlds have processes of their own, and die for themselves.
    if died.ran is None or not died.is_by_kernel or cell.world != "simulated":
        raise ProcessLost(f"CRASH: the process that was to run the candidate {died.how}")
    held_to = died.ran.held_to
    of = "" if held_to == "agreement" else f"property {held_to}: "
    finding = f"{of}CRASH: the process that ran the candidate {died.how}"
    return CaseResult(problem=died.ran.problem, findings=(finding,), failure=CRASH, held_to=held_to)


def result_of_crash(cell: Cell, died: ChildDied, seconds: float) -> CellResult:
    """Returns the verdict on a cell whose process died: it disagrees on the last problem.

    If the process did not die of the kernel, nothing is known of that, and the cell is
    inconclusive.
    """
    try:
        case = case_of_crash(cell, died)
    except ProcessLost as lost:
        result = conclude(CellRun(cell=cell, cases=(), seconds=seconds))
        return replace(result, record=msgspec.structs.replace(result.record, reasons=(str(lost), *result.reasons)))
    return conclude(CellRun(cell=cell, cases=(case,), failure=case, seconds=seconds))


@contextmanager
def fresh_child(*, captured: bool = False) -> Generator[Child]:
    """Starts a process, and ends it in the end.

    Args:
        captured: what it prints is not shown.
    """
    child = Child(captured=captured)
    try:
        yield child
    finally:
        child.end()


def run_in_child(
    cell: Cell, problems: Sequence[Problem], timeout: float, *, captured: bool = False
) -> list[CaseResult]:
    """Runs problems of a cell one after the other, in a process of their own.

    If that dies of the kernel, the crash is all that is returned.

    Raises:
        ProcessLost: if it dies of anything else.
    """
    with fresh_child(captured=captured) as child:
        return run_in(child, cell, problems, timeout)


def run_in(child: Child, cell: Cell, problems: Sequence[Problem], timeout: float) -> list[CaseResult]:
    """Runs problems of a cell one after the other in a process, as ``run_in_child`` does."""
    try:
        return child.run(CasesJob(CellName.of(cell), (cell.candidate.source,), problems, timeout), timeout)
    except ChildDied as died:
        return [case_of_crash(cell, died)]
