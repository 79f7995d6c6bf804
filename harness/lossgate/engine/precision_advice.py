# SPDX-License-Identifier: Apache-2.0
"""Advice where a property fails by so little that a coarser ``Precision`` would explain it."""

from dataclasses import replace

from lossgate.cases.case import Case
from lossgate.diagnosis.coarser_precision import in_one_stage, in_several_stages
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.worlds.base import World


def with_todo(cell: Cell, case: CaseResult, world: World) -> CaseResult:
    """Returns a case of a property beside agreement with what to do, if it disagrees.

    What to do about agreement hangs on the cause.
    """
    if case.agrees or cell.property.needs_adequacy:
        return case
    return replace(case, todo=remedy_of(cell, case, world))


def remedy_of(cell: Cell, failure: CaseResult, world: World) -> str:
    """Returns what to do about a property that fails; "" if its findings say so themselves.

    A kernel that rounds more than it declares may break any property whose numbers are judged. What
    the property advises has then nothing to do with it, so the declaration comes first.

    Args:
        cell: of the property.
        failure: the case that is shown.
        world: where its ranks run.
    """
    if failure.says_what_to_do:
        return ""
    remedy = cell.property.remedy
    declared = _with_which_it_agrees(cell, failure, world)
    if not declared:
        return remedy
    first = f"if the kernel computes in {cell.dtype}, say so: with {declared} this agrees"
    return f"{first}; if not, {remedy}" if remedy else first


def _with_which_it_agrees(cell: Cell, failure: CaseResult, world: World) -> str:
    wrong = [comparison for comparison in failure.comparisons if not comparison.agrees]
    if cell.dtype == "float32" or failure.faults or not wrong or any(comparison.faults for comparison in wrong):
        return ""
    changes = [*in_one_stage(cell.candidate, cell.dtype), *in_several_stages(cell.candidate, cell.dtype)]
    for change in sorted(changes, key=lambda change: not change.is_of_logits):  # what kernels round first of all
        again = run_case(Case(change.of(cell.candidate, cell.dtype), failure.problem, world), cell.property)
        if again.fits and again.agrees:
            return str(change)
    return ""
