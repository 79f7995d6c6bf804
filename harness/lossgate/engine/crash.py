# SPDX-License-Identifier: Apache-2.0
"""What is said of a candidate that ended the process in which it ran."""

from dataclasses import replace

from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.child import ChildDied
from lossgate.engine.verdict import conclude
from lossgate.problems.problem import Problem

CRASH = "Crash"
"""The kind of failure, as evidence and failure files name it."""


def case_of_crash(died: ChildDied, problem: Problem) -> CaseResult:
    """Returns what came of the case that a process died of."""
    of = "" if died.held_to == "agreement" else f"property {died.held_to}: "
    finding = f"{of}CRASH: the process that ran the candidate {died.how}"
    return CaseResult(problem=problem, findings=(finding,), failure=CRASH, held_to=died.held_to)


def result_of_crash(cell: Cell, died: ChildDied, seconds: float) -> CellResult:
    """Returns the verdict on a cell whose process died: it disagrees on the last problem.

    Without one nothing is known of the candidate, and the cell is inconclusive.
    """
    if died.problem is None:
        known = conclude(cell, [], None, 0, seconds)
        reason = f"CRASH: the process {died.how} before it ran a problem"
        return replace(known, reasons=(reason, *known.reasons))
    case = case_of_crash(died, died.problem)
    return conclude(cell, [case], case, 0, seconds)
