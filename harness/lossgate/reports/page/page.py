# SPDX-License-Identifier: Apache-2.0
"""What the HTML page is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lossgate.evidence.records import CellKey, CellRecord, RunRecord
from lossgate.gate.gate_verdict import GateVerdict


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the page shows. The same page always gives the same bytes."""

    title: str
    cells: Sequence[CellRecord]
    """The newest record of each cell."""
    gate: GateVerdict | None
    """What the gate says; None for a report, which has no policy."""
    history: Mapping[CellKey, Sequence[CellRecord]]
    """Records of earlier runs of each cell, in any order; those of the current run do not count."""
    runs: Sequence[RunRecord]
    """The runs that the records name."""
