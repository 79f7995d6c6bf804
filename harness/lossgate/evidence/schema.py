# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a line of evidence, made from the records."""

import ast
import inspect
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from lossgate.engine import cell_record, output_record
from lossgate.engine.cell_record import SCHEMA, CellRecord
from lossgate.evidence import records
from lossgate.evidence.records import EndRecord, RunRecord

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
