# SPDX-License-Identifier: Apache-2.0
"""Says what is wrong with evidence, whatever its verdicts are."""

from collections.abc import Collection, Iterator, Sequence

from lossgate.evidence.gather import Gathered
from lossgate.evidence.records import CellKey, RunRecord
from lossgate.evidence.sealed import digest_of_cells
from lossgate.evidence.summary import CellSummary

_NAMED = 3
"""How many of many things are named."""
_LINES = 5
"""How many lines are described. The others usually have the same cause."""


def troubles(gathered: Gathered) -> list[str]:
    """Returns in whole sentences why evidence is not whole; nothing if it is.

    A gate asks for more; this needs no policy.
    """
    if not gathered.cells and not gathered.damaged:
        return ["there is no evidence of any cell: verify with --evidence, and name its file"]
    return [
        *_damaged(gathered),
        *_contradictory(gathered),
        *_runs(gathered),
        *_parts(gathered.runs.values()),
    ]


def trusted(gathered: Gathered) -> dict[CellKey, CellSummary]:
    """Returns what is told last of each cell, without what contradicts its own numbers."""
    return {key: told for key, told in gathered.newest.items() if told.where not in gathered.contradictory}


def listed(names: Sequence[object]) -> str:
    """Returns the first of many names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(map(str, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def _damaged(gathered: Gathered) -> Iterator[str]:
    for line in gathered.damaged[:_LINES]:
        yield f"{line.where}: {line.message}"
    if (more := len(gathered.damaged) - _LINES) > 0:
        yield f"{more} more lines are damaged"


def _contradictory(gathered: Gathered) -> Iterator[str]:
    cells = {told.where: told.key for of_cell in gathered.cells.values() for told in of_cell}
    found = list(gathered.contradictory.items())
    for where, how in found[:_LINES]:
        yield f"{where}: {cells[where]} contradicts its own numbers: {how}. Verify it again"
    if (more := len(found) - _LINES) > 0:
        yield f"{more} more cells contradict their own numbers"
    for where in gathered.repeated[:_LINES]:
        yield f"{where}: another line starts or ends the same run differently; take one of their files away"


def _runs(gathered: Gathered) -> Iterator[str]:
    """Yields what is wrong with single runs."""
    told: dict[str, list[CellSummary]] = {}
    for one in (one for of_cell in gathered.cells.values() for one in of_cell):
        told.setdefault(one.run, []).append(one)
    for name in sorted(set(told) - set(gathered.runs)):
        yield f"the start of run {name} is not there: its file was cut, or is not the only one. Verify again"
    for name, run in gathered.runs.items():
        yield from _run(run, gathered, told.get(name, []))


def _run(run: RunRecord, gathered: Gathered, cells: Sequence[CellSummary]) -> Iterator[str]:
    end = gathered.ends.get(run.run)
    planned = run.cells if run.cells is not None else end.planned if end is not None else None
    there = {told.key for told in cells}
    missing = [] if planned is None else [key for key in planned if key not in there]
    of = "" if planned is None else f" of {len(planned)}"
    if end is None:
        yield (
            f"run {run.run} has no end: it is not done, was killed, or its file was cut; "
            f"{len(there)}{of} cells are there. Verify again"
        )
    elif end.stopped:
        yield f"run {run.run} was stopped after {len(there)}{of} cells: {end.stopped}"
    elif (end.cells, end.digest) != (len(cells), digest_of_cells([told.digest for told in cells])):
        yield (
            f"run {run.run} says that it wrote {end.cells} cells, and {len(cells)} of it are there"
            if end.cells != len(cells)
            else f"the cells of run {run.run} are not those that it wrote"
        ) + ". Lines are gone or were changed: verify again"
    if missing:
        yield f"run {run.run} lacks {len(missing)}{of} cells that it planned: {listed(missing)}"


def _parts(runs: Collection[RunRecord]) -> Iterator[str]:
    """Yields which parts of a matrix that runs share out are not there."""
    parts: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        if run.part is not None and run.matrix is not None:
            part, _, count = run.part.partition("/")
            parts.setdefault((run.matrix.digest, count), set()).add(part)
    for (_, count), there in sorted(parts.items()):
        absent = [str(i) for i in range(1, _number(count) + 1) if str(i) not in there]
        if absent:
            names = listed([f"{part}/{count}" for part in absent])
            yield f"{len(absent)} of {count} parts of the matrix are not there: {names}; name their files too"


def _number(count: str) -> int:
    """Returns a number of parts; 0 if it is none, or too large for any matrix."""
    return int(count) if count.isdecimal() and len(count) <= 6 else 0
