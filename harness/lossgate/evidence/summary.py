# SPDX-License-Identifier: Apache-2.0
"""The summary of a record: small enough to keep those of 100,000 cells."""

from sys import intern

import msgspec

from lossgate.evidence.reader import Where
from lossgate.evidence.records import CellKey, CellRecord, Failure, KnownFailureRecord, VerdictName
from lossgate.evidence.redo import Redone, redo


class CellSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The record of a cell without the numbers of each problem."""

    key: CellKey
    where: Where
    """The line of its record."""
    digest: str
    """The digest of that line."""
    run: str
    spec: str
    head: str
    source: str
    source_digest: str | None
    source_modified: bool | None = None
    verdict: VerdictName
    reasons: tuple[str, ...]
    causes: tuple[str, ...] = ()
    """What may have gone wrong, in words."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished, in words."""
    problems: int
    comparisons: int
    margin: float
    """The largest statistic of any comparison, as a share of its limit."""
    mde: float | None
    """The minimum detectable effect of the output with the least power; None if it is infinite."""
    kept: tuple[str, ...] = ()
    """The properties that it was held to beside its own, and kept."""
    properties: tuple[str, ...] = ()
    """All properties beside its own that it was to be held to: those that it kept or broke, those
    from which the candidate is exempt, and those of which no problem says anything."""
    exempt: tuple[tuple[str, str], ...] = ()
    """The properties from which the candidate is exempt, and why."""
    excluded: tuple[tuple[str, str], ...] = ()
    """The choices of scenarios that the candidate is not given, and why."""
    resources: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """What a call used, beside its budgets; see the record."""
    symptoms: tuple[str, ...] = ()
    """What disagrees by its numbers: outputs, and faults beside them."""
    failure: Failure | None
    known_failure: KnownFailureRecord | None
    seconds: float
    time: str
    content: int = 0
    """A hash of the record without its run, time, duration and replay command. Other processes have
    another, unless they were forked from this one."""

    @property
    def why(self) -> str:
        """Why it is not AGREE, what may have gone wrong, and what was got where what is wanted, in
        one line.
        """
        shown = self.failure.side_by_side if self.failure is not None else ()
        return "; ".join((*self.reasons, *self.causes, *shown)) or "no reason is given"

    @property
    def expected(self) -> bool:
        """Whether it disagrees as a known failure says."""
        return self.known_failure is not None and self.known_failure.expected


def summarize(record: CellRecord, where: Where, digest: str, redone: Redone | None = None) -> CellSummary:
    """Returns the summary of a record. Strings that many cells have in common are kept once.

    Args:
        record: the record.
        where: the line that holds it.
        digest: the digest of that line.
        redone: what its numbers say, if that is known: ``redo`` is faster for many records.
    """
    redone = redone or redo([record])[0]
    return CellSummary(
        key=CellKey(*map(intern, msgspec.structs.astuple(record.key))),
        where=where,
        digest=digest,
        run=intern(record.run),
        spec=intern(record.spec),
        head=intern(record.head),
        source=intern(record.source),
        source_digest=None if record.source_digest is None else intern(record.source_digest),
        source_modified=record.source_modified,
        verdict=record.verdict,
        reasons=tuple(map(intern, record.reasons)),
        causes=tuple(map(intern, record.causes)),
        not_distinguished=tuple(map(intern, record.not_distinguished)),
        problems=record.problems,
        comparisons=record.comparisons,
        margin=redone.margin,
        mde=record.mde,
        kept=tuple(intern(one.name) for one in record.properties if one.problems and not one.findings),
        properties=tuple(intern(one.name) for one in record.properties),
        exempt=tuple((intern(one.name), intern(one.exempt)) for one in record.properties if one.exempt),
        excluded=tuple((intern(what), intern(why)) for what, why in record.excluded.items()),
        resources=record.resources,
        symptoms=tuple(map(intern, redone.symptoms)),
        failure=record.failure,
        known_failure=record.known_failure,
        seconds=record.seconds,
        time=intern(record.time),
        content=_content(record),
    )


def _content(record: CellRecord) -> int:
    failure = None if record.failure is None else msgspec.structs.replace(record.failure, replay=None)
    properties = tuple(msgspec.structs.replace(held_to, seconds=0.0) for held_to in record.properties)
    bare = msgspec.structs.replace(record, run="", time="", seconds=0.0, failure=failure, properties=properties)
    return hash(msgspec.msgpack.encode(bare))
