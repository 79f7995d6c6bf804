# SPDX-License-Identifier: Apache-2.0
"""Runs cases in a process that has run nothing before."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell
from lossgate.engine.child import Child, ChildDied
from lossgate.engine.crash import case_of_crash
from lossgate.engine.jobs import CasesJob, CellName
from lossgate.problems.problem import Problem


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
