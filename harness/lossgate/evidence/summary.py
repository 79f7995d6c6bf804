# SPDX-License-Identifier: Apache-2.0
"""What people are told of a cell: small enough to keep those of 100,000 cells."""

from dataclasses import dataclass
from hashlib import blake2b
from sys import intern

import msgspec

from lossgate.evidence.columns import Columns
from lossgate.evidence.reader import Where
from lossgate.evidence.records import CellKey, CellRecord, Failure, KnownFailureRecord, VerdictName


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSummary:
    """The record of a cell without the numbers of each problem."""

    key: CellKey
    where: Where
    """The line that tells of it."""
    digest: str
    """Of that line."""
    run: str
    spec: str
    head: str
    source: str
    source_digest: str | None
    verdict: VerdictName
    reasons: tuple[str, ...]
    problems: int
    comparisons: int
    margin: float
    """The largest statistic of any comparison, as a share of its limit."""
    mde: float | None
    """The minimum detectable effect of the output with the least power; None if it is infinite."""
    failure: Failure | None
    known_failure: KnownFailureRecord | None
    seconds: float
    time: str
    numbers: int = 0
    """Is the same for records with the same numbers."""

    @property
    def expected(self) -> bool:
        """Whether it disagrees as a known failure says."""
        return self.known_failure is not None and self.known_failure.expected


def summarize(record: CellRecord, where: Where, digest: str, margin: float | None = None) -> CellSummary:
    """Returns the summary of a record. Strings that many cells have in common are kept once.

    Args:
        record: the record.
        where: the line that holds it.
        digest: of that line.
        margin: of the record, if it is known: ``Columns`` finds those of many records faster.
    """
    source_digest = None if record.source_digest is None else intern(record.source_digest)
    return CellSummary(
        key=CellKey(*map(intern, msgspec.structs.astuple(record.key))),
        where=where,
        digest=digest,
        run=intern(record.run),
        spec=intern(record.spec),
        head=intern(record.head),
        source=intern(record.source),
        source_digest=source_digest,
        verdict=record.verdict,
        reasons=tuple(map(intern, record.reasons)),
        problems=record.problems,
        comparisons=record.comparisons,
        margin=Columns([record]).margins()[0] if margin is None else margin,
        mde=record.mde,
        failure=record.failure,
        known_failure=record.known_failure,
        seconds=record.seconds,
        time=intern(record.time),
        numbers=_numbers(record),
    )


def _numbers(record: CellRecord) -> int:
    """Hashes the numbers of a record, by their bytes. The hash is the same in all processes."""
    counts = record.coverage, record.killed, record.surviving, record.problems, record.comparisons
    return int.from_bytes(blake2b(msgspec.msgpack.encode((record.outputs, counts)), digest_size=8).digest())
