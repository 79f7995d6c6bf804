# SPDX-License-Identifier: Apache-2.0
"""Makes records and gates of a few fields."""

from collections.abc import Sequence
from typing import Any

from lossgate.engine.cell_record import CellKey, CellRecord, Failure, KnownFailureRecord
from lossgate.evidence.reader import Where
from lossgate.evidence.summary import summarize
from lossgate.gate.gate_verdict import Blocker, Committed, Digested, GatedCell, GateReason, GateVerdict
from lossgate.reports.page.entries import Page
from property_tests.meta.made_evidence import cell, run

DIGEST = "ab" * 32
RUN = run(
    [],
    run="1f",
    started="2026-01-31T12:00:00+00:00",
    commit="4f" * 20,
    modified=True,
    versions={"torch": "2.13.0", "lossgate": "0.1.0", "machine": "x86_64"},
    matrix=None,
)
HOSTILE = [
    "<script>window.hit = 1</script>",
    "</script><img src=x onerror='window.hit = 2'>",
    "<!--<script>",
    "{{ 7 * 7 }} {% raw %}",
    "\u2028\u2029'\"\\`${window.hit = 3}",
    "\u202eright to left \U0001f98a \u05e9\u05dc\u05d5\u05dd",
]
"""Names that a careless page would run, or break on."""


def record(candidate: str = "kernel", **changes: Any) -> CellRecord:
    """Returns the record of a cell that agrees, without any numbers."""
    without_numbers: dict[str, Any] = {
        "candidate": candidate,
        "run": RUN.run,
        "time": RUN.started,
        "head": "hidden",
        "source": "kernels.py:kernel",
        "source_digest": DIGEST,
        "comparisons": 6,
        "outputs": (),
        "mde": 1e-3,
        "coverage": {},
        "required": (),
    }
    return cell(**without_numbers | changes)


def known(*, expected: bool) -> KnownFailureRecord:
    return KnownFailureRecord(name="torch-2", example=DIGEST, expected=expected)


def failure(text: str) -> Failure:
    """Returns a failure that says a text wherever it can."""
    return Failure(problem={"spec": text, text: [1, 2]}, description=text, findings=(text,), symptoms=("loss",))


def key(candidate: str) -> CellKey:
    return record(candidate).key


def blocker(kind: GateReason, candidate: str | None = None, message: str = "Mend it.") -> Blocker:
    return Blocker(reason=kind, message=message, cell=None if candidate is None else key(candidate), where="a.jsonl:3")


def gated(cell: CellRecord | str, *blockers: Blocker, **changes: Any) -> GatedCell:
    """Returns what a gate says of a record, or of a cell of this name that is missing."""
    if isinstance(cell, str):
        return GatedCell(key=key(cell), summary=None, blockers=blockers, **changes)
    summary = summarize(cell, Where("a.jsonl", 3), DIGEST)
    return GatedCell(key=cell.key, summary=summary, blockers=blockers, **changes)


def gate(*cells: GatedCell, others: Sequence[Blocker] = ()) -> GateVerdict:
    file = Digested(file="gate.toml", sha256=DIGEST)
    return GateVerdict(
        general=tuple(others),
        cells=cells,
        policy=file,
        evidence=(file,),
        commits=("4f" * 20,),
        committed=Committed.YES,
        sources=(file,),
        versions={"lossgate": ("0.1.0",)},
    )


def page(*cells: CellRecord, gate: GateVerdict | None = None, **changes: Any) -> Page:
    return Page(**{"title": "A page", "cells": cells, "gate": gate, "history": {}, "runs": [], **changes})
