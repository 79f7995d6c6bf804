# SPDX-License-Identifier: Apache-2.0
"""Summaries of records, so small that 100,000 of them fit into memory."""

from sys import intern
from typing import Any

import msgspec

from lossgate.engine.cell_record import CellRecord
from lossgate.evidence.reader import Where

_NUMBERS: dict[str, Any] = {"outputs": (), "coverage": {}, "worst": ()}
"""The fields of a record that take most of its memory, emptied."""
_COMMON = ("run", "spec", "head", "source", "source_digest", "candidate", "property", "layout", "dtype", "time")
"""Texts that many cells have in common. Each text is kept once."""


class CellSummary(CellRecord, frozen=True, kw_only=True, gc=False):
    """The record of a cell without the numbers of each problem, and where it was read."""

    where: Where
    """The line of its record."""
    digest: str
    """The digest of that line."""
    content: int = 0
    """A hash of the record without its run, time, duration and replay command. Only hashes of one
    process and its forks are comparable."""

    @property
    def source_file(self) -> str:
        """The file or module that declares the candidate."""
        return self.source.rpartition(":")[0]


def summarize(record: CellRecord, where: Where, digest: str) -> CellSummary:
    """Returns the summary of a record.

    Args:
        record: the record.
        where: the line that holds it.
        digest: the digest of that line.
    """
    fields: dict[str, Any] = msgspec.structs.asdict(record) | _NUMBERS
    fields |= {name: intern(fields[name]) for name in _COMMON if fields[name] is not None}
    return CellSummary(**fields, where=where, digest=digest, content=_content(record))


def _content(record: CellRecord) -> int:
    properties = tuple(msgspec.structs.replace(held_to, seconds=0.0) for held_to in record.properties)
    bare = msgspec.structs.replace(
        record, replay=None, run="", time="", seconds=0.0, mistakes_seconds=0.0, properties=properties
    )
    return hash(msgspec.msgpack.encode(bare))
