# SPDX-License-Identifier: Apache-2.0
"""Advice where a property fails by so little that a coarser ``Precision`` would explain it."""

from collections.abc import Sequence
from dataclasses import replace

from lossgate.cases.case import Case
from lossgate.diagnosis.coarser_precision import Coarser, in_one_stage, in_several_stages
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.specs.outputs import Output
from lossgate.worlds.base import World

_WITH_ROOM = 0.8
"""The largest share of a limit at which a coarser precision is said to agree: near it, another run
might not.
"""


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
    change = _with_which_it_agrees(cell, failure, world)
    if change is None:
        return remedy
    declared = change.declared(cell.candidate, cell.dtype)
    first = (
        f"if the kernel rounds {change.rounds} to {change.to}, declare for {cell.dtype} {declared}: with it this agrees"
    )
    return f"{first}. If not, {remedy}" if remedy else first


def _with_which_it_agrees(cell: Cell, failure: CaseResult, world: World) -> Coarser | None:
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
    """Sorts first the running sum over tokens if the gradient of weight alone is wrong, and then
    what kernels round first of all: the logits.
    """
    alone = wrong[0].name if len(wrong) == 1 and wrong[0].kind == "gradient" else ""
    return 0 if alone == change.leaf == "weight" else 1 if change.is_of_logits else 2
