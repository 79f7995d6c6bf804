# SPDX-License-Identifier: Apache-2.0
"""Advice for failures of a property that a coarser ``Precision`` would explain."""

from collections.abc import Sequence
from dataclasses import replace

from lossgate.cases.case import Case
from lossgate.diagnosis.coarser_precision import Coarser, in_one_stage, in_several_stages
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.specs.outputs import Output
from lossgate.worlds.base import World

_WITH_ROOM = 0.8
"""The largest share of a limit at which a coarser precision is said to agree. With a larger share,
another run might disagree.
"""


def with_todo(cell: Cell, case: CaseResult, world: World) -> CaseResult:
    """Adds advice to a case that disagrees.

    A case of agreement stays as it is, because advice on it depends on the cause.
    """
    if case.agrees or cell.property.needs_adequacy:
        return case
    return replace(case, todo=remedy_of(cell, case, world))


def remedy_of(cell: Cell, failure: CaseResult, world: World) -> str:
    """Returns advice on a property that fails; "" if its findings say what to do.

    A kernel that rounds more than it declares may break any property that compares numbers. The
    property's own advice does not help then, so advice on the declaration comes first.
    """
    if failure.says_what_to_do:
        return ""
    remedy = cell.property.remedy
    change = _coarser_that_agrees(cell, failure, world)
    if change is None:
        return remedy
    declared = change.declared(cell.candidate, cell.dtype)
    first = (
        f"if the kernel rounds {change.rounds} to {change.to}, declare for {cell.dtype} {declared}; with this "
        "declaration, the property holds"
    )
    return f"{first}. If not, {remedy}" if remedy else first


def _coarser_that_agrees(cell: Cell, failure: CaseResult, world: World) -> Coarser | None:
    """Returns the likeliest coarser precision with which a case agrees; None if there is none."""
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
    """Returns the rank of a change; the likeliest has 0.

    If only the gradient of weight is wrong, the running sum over tokens is likeliest. Next come
    changes of logits, which most kernels round first.
    """
    only_weight = len(wrong) == 1 and wrong[0].kind == "gradient" and wrong[0].name == "weight"
    if only_weight and change.leaf == "weight":
        return 0
    return 1 if change.is_of_logits else 2
