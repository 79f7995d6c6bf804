# SPDX-License-Identifier: Apache-2.0
"""The schema of evidence. A line holds one record: of a run, of a cell, or of the end of a run.

``evidence.schema.json`` is made from these classes and from ``engine/cell_record.py``. A reader
ignores fields that it does not know, so that a later version of lossgate may tell more. A change
that an older reader would misread raises the first number of ``SCHEMA``.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from lossgate.engine.cell_record import CellKey, CellRecord, Sha256, Time
from lossgate.engine.output_record import Count

Part = Annotated[str, Meta(pattern=r"^[1-9]\d{0,8}/[1-9]\d{0,8}$", description="A part and their number, as 3/8.")]


class Matrix(Struct, frozen=True, kw_only=True):
    """All cells of a run, or of the runs that share them out between them."""

    cells: Count
    digest: Sha256
    """Of the names of all cells, sorted. The parts of one matrix have the same."""


class RunRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """The first record of a run. Each cell and the end of the run name it by ``run``."""

    schema: str
    run: str
    """A random name."""
    started: Time
    commit: str | None
    """Of the working folder, if that is a git checkout."""
    modified: bool | None
    """Whether files in it differ from the commit; null if that is not known. Files that are not in
    the commit do not count."""
    host: str
    versions: dict[str, str]
    """Of lossgate, torch, python, and the machine's kind."""
    settings: dict[str, Any]
    """How much was verified: the profile's settings, and the seed."""
    part: Part | None = None
    """Which part of the matrix this run verifies; null for all of it."""
    matrix: Matrix | None = None
    """The whole matrix, if it is known at the start."""
    cells: tuple[CellKey, ...] | None = None
    """The cells of this run, if they are known at the start."""


class EndRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The last record of a run. A run without it was stopped, or its file was cut."""

    schema: str
    run: str
    finished: Time
    cells: Count
    """How many cells it has."""
    cells_digest: Sha256
    """Of the digests of their lines, sorted."""
    stopped: str = ""
    """In words, why not all cells were verified; empty if they were."""
    planned: tuple[CellKey, ...] | None = None
    """The cells of the run, if they were not known at the start."""


Record = RunRecord | CellRecord | EndRecord
