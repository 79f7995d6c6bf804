# SPDX-License-Identifier: Apache-2.0
"""Reads evidence back, for tests. ``made_evidence.py`` makes some."""

from pathlib import Path

from lossgate.engine.cell_record import CellRecord
from lossgate.evidence.reader import GoodLine, read_lines
from lossgate.evidence.records import Record


def records_in(file: Path) -> list[Record]:
    """Returns the records of a file. Fails if a line of it is damaged."""
    lines = list(read_lines(file))
    assert all(isinstance(line, GoodLine) for line in lines), lines
    return [line.record for line in lines if isinstance(line, GoodLine)]


def cells_in(file: Path) -> list[CellRecord]:
    """Returns the records of cells in a file."""
    return [record for record in records_in(file) if isinstance(record, CellRecord)]
