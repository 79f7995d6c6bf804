# SPDX-License-Identifier: Apache-2.0
"""What is said of a candidate in whose process something ended it: the candidate or another."""

from dataclasses import replace

from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.child import ChildDied
from lossgate.engine.verdict import conclude
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
        known = conclude(cell, [], None, 0, seconds)
        return replace(known, reasons=(str(lost), *known.reasons))
    return conclude(cell, [case], case, 0, seconds)
