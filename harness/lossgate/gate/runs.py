# SPDX-License-Identifier: Apache-2.0
"""What a gate asks of runs: that they are whole, and of the right time, commit and versions."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import CellKey, EndRecord, Matrix, RunRecord
from lossgate.evidence.sealed import digest_of_cells
from lossgate.evidence.summary import CellSummary
from lossgate.gate.rules import EvidenceRules
from lossgate.gate.verdict import Blocker, Kind

CLOCK_SKEW = timedelta(minutes=5)
"""How far the clocks of two machines may be apart: evidence from later than that is from the
future."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run with all that evidence tells of it."""

    name: str
    where: str
    """The line of its record, or of its first cell."""
    record: RunRecord | None
    end: EndRecord | None
    cells: tuple[CellSummary, ...]

    @property
    def planned(self) -> frozenset[CellKey]:
        """The cells that it was to verify."""
        at_start = self.record.cells if self.record is not None else None
        at_end = self.end.planned if self.end is not None else None
        return frozenset([*(at_start or ()), *(at_end or ())])


def runs_of(evidence: Gathered) -> list[Run]:
    """Returns the runs that evidence tells of, in the order of their names."""
    cells: defaultdict[str, list[CellSummary]] = defaultdict(list)
    for told in evidence.cells.values():
        for summary in told:
            cells[summary.run].append(summary)
    return [
        Run(
            name=name,
            where=str(evidence.starts[name])
            if name in evidence.starts
            else str(min(c.where for c in cells[name]))
            if cells[name]
            else "",
            record=evidence.runs.get(name),
            end=evidence.ends.get(name),
            cells=tuple(cells[name]),
        )
        for name in sorted({*evidence.runs, *evidence.ends, *cells})
    ]


def incomplete(run: Run) -> Iterator[Blocker]:
    """Yields what is missing of a run."""
    if run.record is None:
        yield _of(run, Kind.DAMAGED, "the record of its start is missing: the file was cut, or parts of it were taken")
    if run.end is None:
        missing = "the record of its end is missing: it was stopped, it still goes on, or the file was cut"
        yield _of(run, Kind.UNFINISHED, f"{missing}. Verify again, into a new file")
    elif run.end.stopped:
        yield _of(run, Kind.UNFINISHED, f"it was stopped: {run.end.stopped}. Verify again, into a new file")
    elif run.end.cells != len(run.cells):
        yield _of(run, Kind.DAMAGED, f"its end tells of {run.end.cells} cells, and the evidence of {len(run.cells)}")
    elif run.end.cells_digest != digest_of_cells([cell.digest for cell in run.cells]):
        yield _of(run, Kind.DAMAGED, "its cells are not those that its end was written for")
    have = {cell.key for cell in run.cells}
    for key in sorted(run.planned - have):
        message = f"run {run.name} was to verify it, and tells nothing of it. Verify again, into a new file"
        yield Blocker(kind=Kind.MISSING, message=message, cell=key, where=run.where)
    if run.record is not None and run.end is not None:
        for key in sorted(have - run.planned):
            message = f"run {run.name} tells of it, and was not to verify it"
            yield Blocker(kind=Kind.CONTRADICTORY, message=message, cell=key, where=run.where)


def missing_parts(runs: list[Run]) -> Iterator[Blocker]:
    """Yields the parts of matrices that no run has verified."""
    parts: defaultdict[tuple[Matrix, str], set[int]] = defaultdict(set)
    whole = {run.record.matrix for run in runs if run.record is not None and run.record.part is None}
    for run in runs:
        if run.record is not None and run.record.part is not None and run.record.matrix is not None:
            number, _, of = run.record.part.partition("/")
            parts[run.record.matrix, of].add(int(number) if number.isdecimal() else 0)
    for (matrix, of), there in sorted(parts.items(), key=lambda item: (item[0][0].digest, item[0][1])):
        if matrix in whole:
            continue
        wanted = range(1, int(of) + 1) if of.isdecimal() and int(of) <= matrix.cells else ()
        gone = [number for number in wanted if number not in there]
        if gone or not wanted:
            named = f"part{'s' * (len(gone) > 1)} {', '.join(f'{n}/{of}' for n in gone)}" if wanted else "all parts"
            verb = "are" if len(gone) != 1 else "is"
            message = (
                f"{named} of the matrix of {matrix.cells} cells {verb} missing; verify with --shard, or add the file"
            )
            yield Blocker(kind=Kind.MISSING, message=message)


def wrong_time(run: Run, rules: EvidenceRules, now: datetime) -> Iterator[Blocker]:
    """Yields whether a run is too old, or from the future."""
    told = [cell.time for cell in run.cells] + ([run.record.started] if run.record is not None else [])
    times = [_parse(text) for text in told]
    if None in times:
        unreadable = next(text for text, time in zip(told, times, strict=True) if time is None)
        yield _of(run, Kind.DAMAGED, f"{unreadable!r} is no time")
        return
    known = sorted(time for time in times if time is not None)
    if known and rules.max_age is not None and now - known[0] > rules.max_age:
        allowed = f"and the policy allows evidence of at most {_in_words(rules.max_age)}"
        yield _of(run, Kind.STALE, f"it is from {_shown(known[0])}, {allowed}. Verify again")
    if known and known[-1] - now > CLOCK_SKEW:
        yield _of(run, Kind.STALE, f"it is from {_shown(known[-1])}, which is in the future; set the clocks right")


def different_code(runs: list[Run], rules: EvidenceRules, commit: str | None) -> Iterator[Blocker]:
    """Yields where evidence is of more than one code, or of another than is to be released."""
    records = [(run, run.record) for run in runs if run.record is not None]
    commits = {record.commit for _, record in records}
    if commit is not None:
        for run, record in records:
            if record.commit != commit:
                yield _of(run, Kind.MIXED, f"it is of {_commit(record.commit)}, and {_commit(commit)} is asked for")
    elif rules.same_commit and len(commits) > 1:
        named = ", ".join(sorted(map(_commit, commits)))
        yield Blocker(kind=Kind.MIXED, message=f"evidence is of several commits: {named}. Verify one of them")
    elif rules.same_commit and None in commits:
        message = "evidence names no commit. Verify in a git checkout, or set same_commit = false"
        yield Blocker(kind=Kind.MIXED, message=message)
    for run, record in records if rules.unmodified else ():
        if record.modified is not False:
            why = "files differed from the commit" if record.modified else "it was no git checkout"
            yield _of(run, Kind.MIXED, f"{why}, and the policy asks for unmodified = true. Commit, and verify again")
    for name in rules.same_versions:
        versions = {record.versions.get(name) for _, record in records}
        if len(versions) > 1 or None in versions:
            named = ", ".join(sorted(version or "unknown" for version in versions))
            yield Blocker(
                kind=Kind.MIXED, message=f"evidence is of several versions of {name}: {named}. Verify with one"
            )
    yield from _different_sources(runs)


def _different_sources(runs: list[Run]) -> Iterator[Blocker]:
    digests: defaultdict[str, set[str | None]] = defaultdict(set)
    for run in runs:
        for cell in run.cells:
            digests[cell.source.rpartition(":")[0]].add(cell.source_digest)
    for file, found in sorted(digests.items()):
        if len(found) > 1:
            message = f"{file} was changed between the cells that were verified. Verify all of it again"
            yield Blocker(kind=Kind.MIXED, message=message)


def _of(run: Run, kind: Kind, message: str) -> Blocker:
    return Blocker(kind=kind, message=f"run {run.name}: {message}", where=run.where)


def _commit(commit: str | None) -> str:
    return f"commit {commit[:12]}" if commit else "no commit"


def _parse(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _in_words(age: timedelta) -> str:
    """Returns an age in the largest unit that gives a whole number."""
    for unit, size in (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        if age % size == timedelta(0):
            return f"{age // size} {unit}{'s' * (age // size != 1)}"
    return str(age)


def _shown(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="minutes")
