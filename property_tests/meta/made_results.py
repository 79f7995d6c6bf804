# SPDX-License-Identifier: Apache-2.0
"""Results of cells that nobody ran, for tests of what shows them."""

from typing import Any

import msgspec

from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult, CellRun, Verdict
from lossgate.engine.recorded import record_of
from lossgate.engine.verdict import pooled_outputs


def made_result(
    cell: Cell,
    verdict: Verdict,
    reasons: tuple[str, ...] = (),
    cases: tuple[CaseResult, ...] = (),
    printed: str = "",
    of_run: dict[str, Any] | None = None,
    **of_record: Any,
) -> CellResult:
    """Returns a result with a verdict that need not follow from its cases.

    Args:
        cell: of which it is.
        verdict: what is said of it.
        reasons: why.
        cases: what was run.
        printed: by the candidate.
        of_run: other fields of what was run.
        **of_record: fields of the record that differ from what was run.
    """
    run = CellRun(cell=cell, cases=cases, **of_run or {})
    record = record_of(run, pooled_outputs(cases), verdict, reasons)
    return CellResult(run=run, record=msgspec.structs.replace(record, **of_record), printed=printed)
