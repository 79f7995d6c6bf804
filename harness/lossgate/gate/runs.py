# SPDX-License-Identifier: Apache-2.0
"""Judges runs for a gate: whether they are whole, and of the right time, commit and versions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from lossgate.engine.cell_record import CellKey, Verdict
from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import EndRecord, Matrix, RunRecord, parse_time
from lossgate.evidence.sealed import digest_of_cells, matrix_of
from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import Blocker, Committed, GateReason
from lossgate.gate.rules import EvidenceRules

_CLOCK_SKEW = timedelta(minutes=5)
"""How far the clocks of two machines may differ. Evidence that is even later is from the future."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, with everything in the evidence about it."""

    name: str
    where: str
    """The line of its record, or of its first cell if there is no record."""
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
    """Returns the runs in the evidence, in the order of their names."""
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
            run,
            GateReason.DAMAGED,
            "the record of its start is missing: the file was cut, or holds only a part of the run",
        )
    if run.end is None:
        missing = "the record of its end is missing: it was stopped, it still goes on, or the file was cut"
        yield _of(run, GateReason.UNFINISHED, f"{missing}. Verify again, into a new file")
    elif run.end.stopped:
        yield _of(run, GateReason.UNFINISHED, f"it was stopped: {run.end.stopped}. Verify again, into a new file")
    elif run.end.cells != len(run.cells):
        yield _of(
            run, GateReason.DAMAGED, f"its end counts {run.end.cells} cells, but the evidence has {len(run.cells)}"
        )
    elif run.end.cells_digest != digest_of_cells([cell.digest for cell in run.cells]):
        yield _of(run, GateReason.DAMAGED, "its end was written for other cells. Verify again, into a new file")
    have = {cell.key for cell in run.cells}
    others = {cell.candidate for cell in run.cells if cell.verdict is not Verdict.DISAGREE}
    failed = {cell.candidate for cell in run.cells} - others if run.end and not run.end.stopped else set[str]()
    for key in sorted(run.planned - have):
        message = f"run {run.name} planned it, but has no result of it"
        if key.candidate in failed:  # of cells that end alike, verify does not try all
            message += ", probably as all others of the candidate disagree: mend them first"
        message += ". Verify again, into a new file"
        yield Blocker(reason=GateReason.MISSING, message=message, cell=key, where=run.where)
    if run.record is not None and run.end is not None:
        for key in sorted(have - run.planned):
            message = f"run {run.name} has a result of it, but did not plan it"
            yield Blocker(reason=GateReason.CONTRADICTORY, message=message, cell=key, where=run.where)


def wrong_matrix(runs: list[Run]) -> Iterator[Blocker]:
    """Yields what is missing of the matrices that runs verified, whole or in parts."""
    parts: defaultdict[Matrix, list[Run]] = defaultdict(list)
    for run in runs:
        if run.record is None:
            continue
        matrix = run.record.matrix
        if matrix is not None:
            parts[matrix].append(run)
        elif run.record.part is not None:
            yield _of(run, GateReason.DAMAGED, f"it is part {run.record.part}, but does not say of which matrix")
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
        noun, verb = ("part", "is") if len(gone) == 1 else ("parts", "are")
        missing = f"{noun} {', '.join(gone)} of the matrix of {matrix.cells} cells {verb} missing"
        yield Blocker(reason=GateReason.MISSING, message=f"{missing}; verify with --shard, or add the file")
    elif matrix_of(frozenset[CellKey]().union(*(run.planned for run in runs))) != matrix:
        message = (
            f"all parts of the matrix of {matrix.cells} cells are there, but together they planned other cells than "
            "the matrix has. Verify again, with the same settings for all parts"
        )
        yield Blocker(reason=GateReason.DAMAGED, message=message)


_NAMED = 20
"""The most missing parts that are named."""


def _missing_parts(runs: list[Run]) -> list[str]:
    """Returns the parts that no run verified.

    Runs may have divided the matrix in several ways, such as by 2 and by 3. No part is missing if
    one of these is complete.
    """
    there: defaultdict[int, set[int]] = defaultdict(set)
    for run in runs:
        if run.record is not None and run.record.part is not None:
            number, of = map(int, run.record.part.split("/"))
            there[of].add(number)
    gone: list[str] = []
    for of, numbers in sorted(there.items()):
        missing = (number for number in range(1, of + 1) if number not in numbers)
        named = [f"{number}/{of}" for number in islice(missing, _NAMED)]
        if not named:
            return []
        gone += named
    return gone


def wrong_time(run: Run, rules: EvidenceRules, now: datetime) -> Iterator[Blocker]:
    """Yields blockers if a run is too old or from the future."""
    written = {cell.time for cell in run.cells}
    if run.record is not None:
        written.add(run.record.started)
    times: list[datetime] = []
    for text in sorted(written):
        if (time := parse_time(text)) is None:
            yield _of(run, GateReason.DAMAGED, f"{text!r} is not a time")
        else:
            times.append(time)
    if times and rules.oldest is not None and now - min(times) > rules.oldest:
        allowed = f"the policy allows evidence of at most {rules.max_age}"
        yield _of(run, GateReason.STALE, f"it is from {_shown(min(times))}, but {allowed}. Verify again")
    if times and max(times) - now > _CLOCK_SKEW:
        later = f"which is later than now, {_shown(now)}"
        yield _of(run, GateReason.STALE, f"it is from {_shown(max(times))}, {later}; set the clocks right")


def different_code(runs: list[Run], rules: EvidenceRules, commit: str | None) -> Iterator[Blocker]:
    """Yields blockers if evidence is of several versions of the code, or of a wrong commit.

    Args:
        runs: all runs.
        rules: what the policy asks for.
        commit: the commit that is to be released, if it is known.
    """
    records = [(run, run.record) for run in runs if run.record is not None]
    yield from _other_commits(records, rules, commit)
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


def _other_commits(records: list[tuple[Run, RunRecord]], rules: EvidenceRules, commit: str | None) -> Iterator[Blocker]:
    commits = {record.commit for _, record in records}
    if commit is not None:
        for run, record in records:
            if record.commit != commit:
                yield _of(
                    run, GateReason.MIXED, f"it is of {_commit(record.commit)}, but {_commit(commit)} is asked for"
                )
    elif rules.same_commit and len(commits) > 1:
        named = ", ".join(sorted(map(_commit, commits)))
        yield Blocker(reason=GateReason.MIXED, message=f"evidence is of several commits: {named}. Verify one of them")
    elif rules.same_commit and None in commits:
        message = "evidence names no commit. Verify in a git checkout, or set same_commit = false"
        yield Blocker(reason=GateReason.MIXED, message=message)


def _modified(runs: list[Run]) -> Iterator[Blocker]:
    """Yields a blocker for each run and each source that may differ from its commit."""
    for run in runs:
        if run.record is None or run.record.modified is False:
            continue
        why = "files differed from the commit"
        if run.record.modified is None:
            why = f"it is not known whether {why}: git could not say"
        yield _of(run, GateReason.MIXED, f"{why}, but the policy asks for unmodified = true. Commit, and verify again")
    files = _committed_sources(cell for run in runs for cell in run.cells)
    for file in sorted(file for file, found in files.items() if found is not Committed.YES):
        differed = f"{file} was not as in the commit"
        message = f"{differed}, but the policy asks for unmodified = true. Commit it, and verify again"
        yield Blocker(reason=GateReason.MIXED, message=message)


def _different_sources(runs: list[Run]) -> Iterator[Blocker]:
    digests: defaultdict[str, set[str | None]] = defaultdict(set)
    for run in runs:
        for cell in run.cells:
            digests[cell.source_file].add(cell.source_digest)
    for file, found in sorted(digests.items()):
        if len(found) > 1:
            message = f"{file} was changed while its candidates were verified. Verify all of them again"
            yield Blocker(reason=GateReason.MIXED, message=message)


def _committed_sources(cells: Iterable[CellSummary]) -> dict[str, Committed]:
    """Returns, for each file that declares a candidate, whether it was as in the commit."""
    found: dict[str, Committed] = {}
    for cell in cells:
        if cell.source_digest is not None:
            before = found.get(cell.source_file, Committed.YES)
            found[cell.source_file] = max(before, Committed.of(cell.source_modified))
    return found


def all_committed(runs: Iterable[RunRecord], cells: Iterable[CellSummary]) -> Committed:
    """Returns whether all files of evidence were as in their commit."""
    checkouts = [Committed.of(run.modified) for run in runs]
    return max([*checkouts, *_committed_sources(cells).values()], default=Committed.UNKNOWN)


def _of(run: Run, reason: GateReason, message: str) -> Blocker:
    return Blocker(reason=reason, message=f"run {run.name}: {message}", where=run.where)


def _commit(commit: str | None) -> str:
    return f"commit {commit}" if commit else "no commit"


def _shown(time: datetime) -> str:
    return time.isoformat(timespec="minutes")
