# SPDX-License-Identifier: Apache-2.0
"""Describes the runs in evidence: when, where, how long, of which commits and versions."""

from collections import Counter
from collections.abc import Iterable, Iterator

from lossgate.base.spelling import counted
from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import EndRecord, RunRecord, parse_time
from lossgate.reports.console import printable

_SHOWN = 5
"""How many of the newest runs, files, commits and so on are shown one by one."""
_COMMIT_DIGITS = 12


def run_lines(gathered: Gathered) -> Iterator[tuple[str, str]]:
    """Yields lines about runs, each with a heading. A repeated heading is left empty."""
    cells = Counter(result.run for of_cell in gathered.cells.values() for result in of_cell)
    files = [f"{printable(file.file)}  (sha256 {file.sha256[:_COMMIT_DIGITS]})" for file in gathered.files]
    runs = [
        _run_line(run, gathered.ends.get(name), cells[name])
        for name, run in sorted(gathered.runs.items(), key=lambda item: item[1].started, reverse=True)
    ]
    yield from _first("files", files, "files")
    yield from _first("runs", runs, "earlier runs")
    yield from _first("commits", _counted(_commit_of(run) for run in gathered.runs.values()), "commits")
    yield from _first("versions", _counted(_versions_of(run) for run in gathered.runs.values()), "others")
    yield from _first("hosts", [", ".join(_counted(printable(run.host) for run in gathered.runs.values()))], "hosts")


def _first(heading: str, lines: list[str], others: str) -> Iterator[tuple[str, str]]:
    shown = [line for line in lines[:_SHOWN] if line]
    more = [f"and {len(lines) - _SHOWN} {others}"] if len(lines) > _SHOWN else []
    for number, line in enumerate([*shown, *more]):
        yield heading if number == 0 else "", line


def _run_line(run: RunRecord, end: EndRecord | None, cells: int) -> str:
    part = f", part {printable(run.part)}" if run.part is not None else ""
    finished = end.finished if end is not None else None
    return f"{printable(run.run)}  {_period(run.started, finished)}, {counted(cells, 'cell')}{part}, seed {_seed(run)}"


def _seed(run: RunRecord) -> str:
    return printable(str(run.settings.get("seed", "unknown")))


def _commit_of(run: RunRecord) -> str:
    """Returns the commit of a run in words."""
    if run.commit is None:
        return "none: not in a git checkout"
    return printable(run.commit[:_COMMIT_DIGITS]) + (" with changes" if run.modified else "")


def _versions_of(run: RunRecord) -> str:
    """Returns the versions of a run in words."""
    return ", ".join(f"{printable(name)} {printable(version)}" for name, version in run.versions.items())


def _counted(words: Iterable[str]) -> list[str]:
    """Returns each word once, with the number of its runs if there are several words."""
    counts = Counter(words)
    if len(counts) == 1:
        return list(counts)
    return [f"{word} ({counted(count, 'run')})" for word, count in counts.most_common()]


def _period(start: str, end: str | None) -> str:
    """Returns the start and the end of a run, and its seconds, in words."""
    if end is None:
        return f"{moment(start)}, without an end"
    first, last = parse_time(start), parse_time(end)
    if first is None or last is None:
        return f"{moment(start)} to {moment(end)}"
    until = f"{last:%H:%M:%S}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M:%S}"
    return f"{first:%Y-%m-%d %H:%M:%S} to {until} UTC, {(last - first).total_seconds():.0f} s"


def moment(time: str) -> str:
    """Returns a time in words, or the text as it is if it is no time."""
    parsed = parse_time(time)
    return printable(time) if parsed is None else f"{parsed:%Y-%m-%d %H:%M:%S} UTC"
