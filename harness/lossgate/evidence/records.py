# SPDX-License-Identifier: Apache-2.0
"""The records of evidence. A line holds one record: of a run, of a cell, or of the end of a run.

``evidence.schema.json`` is made from these classes and from ``engine/cell_record.py``. A reader
ignores fields that it does not know, so a later version of lossgate may add fields. A change that
an older reader would misread raises the first number of ``SCHEMA``.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from lossgate.engine import cell_record, output_record
from lossgate.engine.cell_record import SCHEMA, CellKey, CellRecord, Sha256, Time
from lossgate.engine.output_record import Count
from lossgate.evidence import records

Part = Annotated[str, Meta(pattern=r"^[1-9]\d{0,8}/[1-9]\d{0,8}$", description="Which part of how many, such as 3/8.")]


class Matrix(Struct, frozen=True, kw_only=True):
    """All cells of a run, or of several runs that divided the cells among them."""

    cells: Count
    digest: Sha256
    """The SHA-256 of the sorted names of all cells. All parts of a matrix have the same digest."""


class RunRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """The first record of a run. The records of its cells and of its end have the same ``run``."""

    schema: str
    run: str
    """A random name."""
    started: Time
    commit: str | None
    """The commit of the working folder; null if that is no git checkout."""
    modified: bool | None
    """Whether files of the commit were changed in the working folder; null if that is not known.
    Further files do not count."""
    host: str
    versions: dict[str, str]
    """The versions of lossgate, torch and python, and the kind of machine."""
    settings: dict[str, Any]
    """The settings of the run, and its seed."""
    part: Part | None = None
    """The part of the matrix that this run verifies; null for the whole matrix."""
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
    """The number of cells that the run wrote."""
    cells_digest: Sha256
    """The SHA-256 of the sorted digests of the lines of these cells."""
    stopped: str = ""
    """Why not all cells were verified, in words; empty if they were."""
    planned: tuple[CellKey, ...] | None = None
    """The cells of the run, if they were not known at the start."""


Record = RunRecord | CellRecord | EndRecord


def parse_time(text: str) -> datetime | None:
    """Returns the time of a record in UTC, or None if the text is no time."""
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo is not None else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None


SCHEMA_FILE = Path(__file__).with_name("evidence.schema.json")
"""The published schema. A test holds it to the records."""

_DIGEST = {
    "type": "string",
    "pattern": "^[0-9a-f]{64}$",
    "description": "The SHA-256 of the line without this field. It is the last field of the line.",
}


def json_schema() -> str:
    """Returns the schema of a line, as the published file has it."""
    kinds = (RunRecord, CellRecord, EndRecord)
    notes = _notes()
    references, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for name, definition in definitions.items():
        for field, text in notes.get(name, {}).items():
            definition["properties"][field]["description"] = text
    for kind in kinds:
        _add_digest(definitions[kind.__name__])
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:lossgate:evidence-{SCHEMA}.json",
        "title": "A line of lossgate's evidence",
        "description": "A record of a run, of a cell, or of the end of a run. Later versions may add fields.",
        "oneOf": list(references),
        "$defs": definitions,
    }
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def _notes() -> dict[str, dict[str, str]]:
    """Returns the text below each field of each record class, by class and field."""
    notes: dict[str, dict[str, str]] = {}
    for module in (output_record, cell_record, records):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                notes[node.name] = dict(_notes_of(node))
    return notes


def _notes_of(record: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(record.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())
            case _:  # this field has no text, or this is no field
                pass


def _add_digest(definition: dict[str, Any]) -> None:
    assert "digest" not in definition["properties"], "the seal of a line has this name"
    definition["properties"]["digest"] = _DIGEST
    definition["required"] = [*definition["required"], "digest"]
