# SPDX-License-Identifier: Apache-2.0
"""Describes the runs in evidence: when, where, how long, of which commits and versions."""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from lossgate.base.spelling import counted
from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import EndRecord, RunRecord
from lossgate.reports.plain import printable

_SHOWN = 5
"""How many runs, or files, are shown one by one: the newest."""
_COMMIT_DIGITS = 12


def run_lines(gathered: Gathered) -> Iterator[tuple[str, str]]:
    """Yields headings and lines of text about runs. The heading is empty where it is as before."""
    cells = Counter(result.run for of_cell in gathered.cells.values() for result in of_cell)
    files = [f"{printable(file.file)}  (sha256 {file.sha256[:_COMMIT_DIGITS]})" for file in gathered.files]
    runs = [
        _run_line(run, gathered.ends.get(name), cells[name])
        for name, run in sorted(gathered.runs.items(), key=lambda item: item[1].started, reverse=True)
    ]
    yield from _first("files", files, "files")
    yield from _first("runs", runs, "earlier runs")
    yield from _first("commits", _counted(commit_of(run) for run in gathered.runs.values()), "commits")
    yield from _first("versions", _counted(versions_of(run) for run in gathered.runs.values()), "others")
    yield from _first("hosts", [", ".join(_counted(printable(run.host) for run in gathered.runs.values()))], "hosts")


def _first(heading: str, lines: list[str], others: str) -> Iterator[tuple[str, str]]:
    shown = [line for line in lines[:_SHOWN] if line]
    more = [f"and {len(lines) - _SHOWN} {others}"] if len(lines) > _SHOWN else []
    for i, line in enumerate([*shown, *more]):
        yield "" if i else heading, line


def _run_line(run: RunRecord, end: EndRecord | None, cells: int) -> str:
    part = f", part {printable(run.part)}" if run.part is not None else ""
    finished = end.finished if end is not None else None
    return f"{printable(run.run)}  {period(run.started, finished)}, {counted(cells, 'cell')}{part}, seed {_seed(run)}"


def _seed(run: RunRecord) -> str:
    return printable(str(run.settings.get("seed", "unknown")))


def commit_of(run: RunRecord) -> str:
    """Returns the commit of a run in words."""
    if run.commit is None:
        return "none: not in a git checkout"
    return printable(run.commit[:_COMMIT_DIGITS]) + (" with changes" if run.modified else "")


def versions_of(run: RunRecord) -> str:
    """Returns the versions of a run in words."""
    return ", ".join(f"{printable(name)} {printable(version)}" for name, version in run.versions.items())


def _counted(words: Iterable[str]) -> list[str]:
    """Returns each word once, with the number of runs that have it if there are several words."""
    counts = Counter(words)
    if len(counts) == 1:
        return list(counts)
    return [f"{word} ({counted(count, 'run')})" for word, count in counts.most_common()]


def period(start: str, end: str | None) -> str:
    """Returns from when to when something was, and for how long."""
    if end is None:
        return f"{moment(start)}, without an end"
    first, last = _parse(start), _parse(end)
    if first is None or last is None:
        return f"{moment(start)} to {moment(end)}"
    until = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    return f"{first:%Y-%m-%d %H:%M:%S} to {until} UTC, {(last - first).total_seconds():.0f} s"


def moment(time: str) -> str:
    """Returns a time for people to read, or as it stands if it is none."""
    parsed = _parse(time)
    return printable(time) if parsed is None else f"{parsed:%Y-%m-%d %H:%M:%S} UTC"


def _parse(time: str) -> datetime | None:
    try:
        parsed = datetime.fromisoformat(time)
        return parsed.astimezone(UTC) if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        return None
