# SPDX-License-Identifier: Apache-2.0
"""Says what is wrong with evidence itself, whatever its verdicts are. It needs no policy."""

from collections.abc import Iterator, Sequence

from lossgate.engine.cell_record import CellKey
from lossgate.evidence.gather import Gathered
from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import GateReason
from lossgate.gate.runs import incomplete, runs_of, wrong_matrix

_NAMED = 3
"""The most names that are listed."""
_LIKE = 5
"""The most troubles of a kind that are listed. The others usually have the same cause."""


def troubles(gathered: Gathered) -> list[str]:
    """Returns sentences that say why evidence is not whole; nothing if it is."""
    by_kind: dict[GateReason, list[str]] = {}
    for kind, message in _troubles(gathered):
        by_kind.setdefault(kind, []).append(message)
    return [line for messages in by_kind.values() for line in _first(messages)]


def trusted(gathered: Gathered) -> dict[CellKey, CellSummary]:
    """Returns the newest result of each cell, unless it contradicts its own numbers."""
    return {key: result for key, result in gathered.newest.items() if result.where not in gathered.contradictory}


def listed(names: Sequence[object]) -> str:
    """Returns the first names of a list, and how many more there are."""
    first = ", ".join(map(str, names[:_NAMED]))
    more = len(names) - _NAMED
    return f"{first} and {more} more" if more > 0 else first


def _troubles(gathered: Gathered) -> Iterator[tuple[GateReason, str]]:
    if not gathered.cells:
        yield GateReason.EMPTY, "there is no evidence of any cell; name files that lossgate verify --evidence wrote"
    for line in gathered.damaged:
        yield GateReason.DAMAGED, f"{line.where}: {line.message}"
    cells = {result.where: result.key for of_cell in gathered.cells.values() for result in of_cell}
    for where, how in gathered.contradictory.items():
        yield GateReason.CONTRADICTORY, f"{where}: {cells[where]} contradicts its own numbers: {how}. Verify it again"
    for where in gathered.repeated:
        yield GateReason.CONTRADICTORY, f"{where}: another line has started or ended this run differently"
    runs = runs_of(gathered)
    blockers = [blocker for run in runs for blocker in incomplete(run)]
    for blocker in (*blockers, *wrong_matrix(runs)):
        about = "" if blocker.cell is None else f"{blocker.cell}: "
        yield blocker.reason, f"{about}{blocker.message}"


def _first(messages: Sequence[str]) -> list[str]:
    more = len(messages) - _LIKE
    if more <= 0:
        return [*messages]
    return [*messages[:_LIKE], f"and {more} more like these"]
