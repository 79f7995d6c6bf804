# SPDX-License-Identifier: Apache-2.0
"""What a gate asks of runs: that they are whole, and of the right time, commit and versions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice

from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import CellKey, EndRecord, Matrix, RunRecord
from lossgate.evidence.sealed import digest_of_cells, matrix_of
from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import Blocker, Committed, GateReason
from lossgate.gate.rules import EvidenceRules

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
    for results in evidence.cells.values():
        for summary in results:
            cells[summary.run].append(summary)
    return [
        Run(
            name=name,
            where=_where(evidence, name, cells[name]),
            record=evidence.runs.get(name),
            end=evidence.ends.get(name),
            cells=tuple(cells[name]),
        )
        for name in sorted({*evidence.runs, *evidence.ends, *cells})
    ]


def _where(evidence: Gathered, name: str, cells: list[CellSummary]) -> str:
    if name in evidence.starts:
        return str(evidence.starts[name])
    return str(min(cell.where for cell in cells)) if cells else ""


def incomplete(run: Run) -> Iterator[Blocker]:
    """Yields what is missing of a run."""
    if run.record is None:
        yield _of(
            run, GateReason.DAMAGED, "the record of its start is missing: the file was cut, or parts of it were taken"
        )
    if run.end is None:
        missing = "the record of its end is missing: it was stopped, it still goes on, or the file was cut"
        yield _of(run, GateReason.UNFINISHED, f"{missing}. Verify again, into a new file")
    elif run.end.stopped:
        yield _of(run, GateReason.UNFINISHED, f"it was stopped: {run.end.stopped}. Verify again, into a new file")
    elif run.end.cells != len(run.cells):
        yield _of(
            run, GateReason.DAMAGED, f"its end counts {run.end.cells} cells, and the evidence has {len(run.cells)}"
        )
    elif run.end.cells_digest != digest_of_cells([cell.digest for cell in run.cells]):
        yield _of(run, GateReason.DAMAGED, "its cells are not those that its end was written for")
    have = {cell.key for cell in run.cells}
    for key in sorted(run.planned - have):
        message = f"run {run.name} planned it, and has no result of it. Verify again, into a new file"
        yield Blocker(reason=GateReason.MISSING, message=message, cell=key, where=run.where)
    if run.record is not None and run.end is not None:
        for key in sorted(have - run.planned):
            message = f"run {run.name} has a result of it, and did not plan it"
            yield Blocker(reason=GateReason.CONTRADICTORY, message=message, cell=key, where=run.where)


def wrong_matrix(runs: list[Run]) -> Iterator[Blocker]:
    """Yields what is missing of matrices that runs verified, in parts or whole."""
    parts: defaultdict[Matrix, list[Run]] = defaultdict(list)
    for run in runs:
        if run.record is None:
            continue
        matrix = run.record.matrix
        if matrix is not None:
            parts[matrix].append(run)
        elif run.record.part is not None:
            yield _of(run, GateReason.DAMAGED, f"it is part {run.record.part}, and does not say of which matrix")
    for matrix, sharing in sorted(parts.items(), key=lambda item: item[0].digest):
        yield from _of_matrix(matrix, sharing)


def _of_matrix(matrix: Matrix, runs: list[Run]) -> Iterator[Blocker]:
    whole = [run for run in runs if run.record is not None and run.record.part is None]
    for run in whole:
        if matrix_of(run.planned) != matrix:
            yield _of(run, GateReason.DAMAGED, f"it planned other cells than its matrix of {matrix.cells} cells has")
    if whole:
        return
    if gone := _missing_parts(runs):
        named = f"part{'s' * (len(gone) > 1)} {', '.join(gone)}"
        verb = "are" if len(gone) > 1 else "is"
        message = f"{named} of the matrix of {matrix.cells} cells {verb} missing; verify with --shard, or add the file"
        yield Blocker(reason=GateReason.MISSING, message=message)
    elif matrix_of(frozenset[CellKey]().union(*(run.planned for run in runs))) != matrix:
        message = f"all parts of the matrix of {matrix.cells} cells are there, and they planned other cells"
        yield Blocker(reason=GateReason.DAMAGED, message=message)


_NAMED = 20
"""The most missing parts that are named."""


def _missing_parts(runs: list[Run]) -> list[str]:
    """Returns the parts that no run verified. Runs may have shared the matrix out in several ways;
    one that is complete is enough.
    """
    there: defaultdict[int, set[int]] = defaultdict(set)
    for run in runs:
        if run.record is not None and run.record.part is not None:
            number, of = map(int, run.record.part.split("/"))
            there[of].add(number)
    gone = [
        [f"{number}/{of}" for number in islice((n for n in range(1, of + 1) if n not in numbers), _NAMED)]
        for of, numbers in sorted(there.items())
    ]
    return [] if not all(gone) else [part for parts in gone for part in parts]


def wrong_time(run: Run, rules: EvidenceRules, now: datetime) -> Iterator[Blocker]:
    """Yields whether a run is too old, or from the future."""
    written = {cell.time for cell in run.cells} | ({run.record.started} if run.record is not None else set[str]())
    times: list[datetime] = []
    for text in sorted(written):
        if (time := _parse(text)) is None:
            yield _of(run, GateReason.DAMAGED, f"{text!r} is not a time")
        else:
            times.append(time)
    if times and rules.oldest is not None and now - min(times) > rules.oldest:
        allowed = f"and the policy allows evidence of at most {rules.max_age}"
        yield _of(run, GateReason.STALE, f"it is from {_shown(min(times))}, {allowed}. Verify again")
    if times and max(times) - now > CLOCK_SKEW:
        later = f"which is later than now, {_shown(now)}"
        yield _of(run, GateReason.STALE, f"it is from {_shown(max(times))}, {later}; set the clocks right")


def different_code(runs: list[Run], rules: EvidenceRules, commit: str | None) -> Iterator[Blocker]:
    """Yields where evidence is of more than one code, or of another than is to be released."""
    records = [(run, run.record) for run in runs if run.record is not None]
    commits = {record.commit for _, record in records}
    if commit is not None:
        for run, record in records:
            if record.commit != commit:
                yield _of(
                    run, GateReason.MIXED, f"it is of {_commit(record.commit)}, and {_commit(commit)} is asked for"
                )
    elif rules.same_commit and len(commits) > 1:
        named = ", ".join(sorted(map(_commit, commits)))
        yield Blocker(reason=GateReason.MIXED, message=f"evidence is of several commits: {named}. Verify one of them")
    elif rules.same_commit and None in commits:
        message = "evidence names no commit. Verify in a git checkout, or set same_commit = false"
        yield Blocker(reason=GateReason.MIXED, message=message)
    if rules.unmodified:
        yield from _modified(runs)
    for name in rules.same_versions:
        versions = {record.versions.get(name) for _, record in records}
        if len(versions) > 1 or None in versions:
            named = ", ".join(sorted(version or "unknown" for version in versions))
            yield Blocker(
                reason=GateReason.MIXED, message=f"evidence is of several versions of {name}: {named}. Verify with one"
            )
    yield from _different_sources(runs)


def _modified(runs: list[Run]) -> Iterator[Blocker]:
    """Yields where it is not sure that evidence is of a commit."""
    for run in runs:
        if run.record is not None and (found := Committed.of(run.record.modified)) is not Committed.YES:
            differed = "files differed from the commit"
            unknown = f"it is not known whether {differed}: git could not say"
            why = differed if found is Committed.NO else unknown
            yield _of(
                run, GateReason.MIXED, f"{why}, and the policy asks for unmodified = true. Commit, and verify again"
            )
    files = _committed_sources(cell for run in runs for cell in run.cells)
    for file in sorted(file for file, found in files.items() if found is not Committed.YES):
        message = f"{file} was not as in the commit, and the policy asks for unmodified = true. Commit it"
        yield Blocker(reason=GateReason.MIXED, message=f"{message}, and verify again")


def _different_sources(runs: list[Run]) -> Iterator[Blocker]:
    digests: defaultdict[str, set[str | None]] = defaultdict(set)
    for run in runs:
        for cell in run.cells:
            digests[cell.source.rpartition(":")[0]].add(cell.source_digest)
    for file, found in sorted(digests.items()):
        if len(found) > 1:
            message = f"{file} was changed between the cells that were verified. Verify all of it again"
            yield Blocker(reason=GateReason.MIXED, message=message)


def _committed_sources(cells: Iterable[CellSummary]) -> dict[str, Committed]:
    """Returns for each file that declares a candidate whether it was as in the commit."""
    found: dict[str, Committed] = {}
    for cell in cells:
        if cell.source_digest is not None:
            file = cell.source.rpartition(":")[0]
            found[file] = max(found.get(file, Committed.YES), Committed.of(cell.source_modified))
    return found


def all_committed(runs: Iterable[RunRecord], cells: Iterable[CellSummary]) -> Committed:
    """Returns whether all files of evidence were as in their commit."""
    checkouts = [Committed.of(run.modified) for run in runs]
    return max([*checkouts, *_committed_sources(cells).values()], default=Committed.UNKNOWN)


def _of(run: Run, reason: GateReason, message: str) -> Blocker:
    return Blocker(reason=reason, message=f"run {run.name}: {message}", where=run.where)


def _commit(commit: str | None) -> str:
    return f"commit {commit}" if commit else "no commit"


def _parse(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _shown(time: datetime) -> str:
    return time.isoformat(timespec="minutes")
