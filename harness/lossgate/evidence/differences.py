# SPDX-License-Identifier: Apache-2.0
"""The differences between two gatherings of evidence: in cells, and in the runs behind them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import NamedTuple

from lossgate.engine.cell_record import CellKey, CellRecord, Outcome
from lossgate.evidence.gather import Gathered, gather
from lossgate.evidence.reader import Where
from lossgate.evidence.records import RunRecord
from lossgate.evidence.sight import Sight, in_words, losses, sight_of
from lossgate.evidence.summary import CellSummary


class Change(StrEnum):
    """How a cell changed, the worst first."""

    DISAGREES = "disagree now"
    BREAKS = "break promises now"
    VANISHED = "vanished"
    INCONCLUSIVE = "inconclusive now"
    EXCUSED = "known failures now, of which only a frozen example is judged"
    LESS_POWER = "lost power"
    OTHERWISE = "are wrong in another way"
    BETTER = "better"
    APPEARED = "appeared"

    @property
    def is_worse(self) -> bool:
        return self not in (Change.OTHERWISE, Change.BETTER, Change.APPEARED)


_WRONG: Mapping[str, Change] = {Outcome.DISAGREE: Change.DISAGREES, Outcome.PROMISE_BROKEN: Change.BREAKS}
"""How a cell changes that gets one of these outcomes."""


class CellChange(NamedTuple):
    """How one cell changed."""

    change: Change
    key: CellKey
    message: str
    weight: float = 0.0
    """How bad the change is. The worst of a kind come first."""


@dataclass(frozen=True)
class Side:
    """One of the two gatherings."""

    gathered: Gathered
    cells: dict[CellKey, CellSummary]
    """The newest result of each cell, without those that contradict their own numbers."""
    sights: dict[CellKey, Sight]


def read_side(path: Path) -> Side:
    """Reads a file or a folder of evidence.

    Raises:
        UsageError: if it cannot be read.
    """
    sights: dict[CellKey, Sight] = {}

    def keep(record: CellRecord, _: Where) -> None:
        known = sights.get(record.key)
        if known is None or record.time >= known.time:
            sights[record.key] = sight_of(record)

    gathered = gather([path], keep)
    newest = {key: cell for key, cell in gathered.newest.items() if cell.where not in gathered.contradictory}
    return Side(gathered, newest, sights)


def changes(before: Side, after: Side) -> list[CellChange]:
    """Returns how cells changed, the worst first.

    A cell that contradicts its own numbers on either side is left out.
    """
    order = list(Change)
    return sorted(_changes(before, after), key=lambda one: (order.index(one.change), -one.weight))


def _changes(before: Side, after: Side) -> Iterator[CellChange]:
    for key, cell in before.cells.items():
        if key not in after.gathered.cells:
            yield CellChange(Change.VANISHED, key, f"was {_outcome(cell)}")
        elif key in after.cells:
            yield from _of_verdict(cell, after.cells[key])
            yield from _of_sight(key, before, after)
    for key, cell in after.cells.items():
        if key in before.gathered.cells:
            continue
        if (change := _WRONG.get(_outcome(cell))) is not None:
            yield CellChange(change, key, f"was not there; {_why(cell)}", _margin(cell))
        else:
            yield CellChange(Change.APPEARED, key, f"is {_outcome(cell)}", _margin(cell))


def _of_verdict(before: CellSummary, after: CellSummary) -> Iterator[CellChange]:
    was, now = _outcome(before), _outcome(after)
    key = after.key
    if was == now:
        if now in _WRONG and _symptoms(before) != _symptoms(after):
            message = f"was in {_symptoms(before)}, is in {_symptoms(after)}"
            yield CellChange(Change.OTHERWISE, key, message, _margin(after))
        return
    if (was, now) == (Outcome.DISAGREE, Outcome.PROMISE_BROKEN):
        yield CellChange(Change.BETTER, key, f"was {was}, is {now}: {_why(after)}")
    elif now in _WRONG:
        yield CellChange(_WRONG[now], key, f"was {was}; {_why(after)}", _margin(after))
    elif now == "INCONCLUSIVE":
        effect = inf if after.mde is None else after.mde
        yield CellChange(Change.INCONCLUSIVE, key, f"was {was}; {_why(after)}", effect)
    elif now == "AGREE":
        yield CellChange(Change.BETTER, key, f"was {was}, is AGREE")
    else:
        yield CellChange(Change.EXCUSED, key, f"was {was}, is a {now}")


def _of_sight(key: CellKey, before: Side, after: Side) -> Iterator[CellChange]:
    """Yields how a cell lost power, if neither side disagrees.

    A disagreement stops a cell early, so its power means little. A cell that agreed and is now
    INCONCLUSIVE is reported by its verdict.
    """
    was, now = _outcome(before.cells[key]), _outcome(after.cells[key])
    if (was, now) not in (("AGREE", "AGREE"), ("INCONCLUSIVE", "AGREE"), ("INCONCLUSIVE", "INCONCLUSIVE")):
        return
    if found := losses(before.sights[key], after.sights[key]):
        yield CellChange(Change.LESS_POWER, key, in_words(found), found[0].factor)


def _outcome(cell: CellSummary) -> str:
    return "known failure" if cell.expected else cell.outcome


def _margin(cell: CellSummary) -> float:
    return inf if cell.margin is None else cell.margin


def _why(cell: CellSummary) -> str:
    return cell.first_told or "it has no reason"


def _symptoms(cell: CellSummary) -> str:
    if cell.outcome is Outcome.PROMISE_BROKEN:
        return ", ".join(cell.broken)
    return ", ".join(cell.failure.symptoms) if cell.failure is not None else "all problems pooled"


def surroundings(before: Gathered, after: Gathered) -> list[str]:
    """Returns the other differences in words: commits, versions, settings, sources."""
    was, now = _around(before), _around(after)
    return [
        f"{name}: {_either(was.get(name))}, now {_either(now.get(name))}"
        for name in dict.fromkeys([*was, *now])
        if was.get(name) != now.get(name)
    ]


def _either(values: Iterable[str] | None) -> str:
    return " and ".join(sorted(values)) if values else "none"


def _around(gathered: Gathered) -> dict[str, set[str]]:
    """Returns facts about the newest results, such as ``commit``. Each fact has a set of values."""
    found: dict[str, set[str]] = {}
    newest = gathered.newest.values()
    for name in dict.fromkeys(cell.run for cell in newest):
        if (run := gathered.runs.get(name)) is not None:
            for what, value in _of_run(run).items():
                found.setdefault(what, set()).add(value)
    for cell in newest:
        found.setdefault("world", set()).add(cell.key.world)
        found.setdefault("device", set()).add(cell.key.device)
        digest = (cell.source_digest or "unknown")[:12]
        found.setdefault(f"source {cell.source_file}", set()).add(f"sha256 {digest}")
    return found


def _of_run(run: RunRecord) -> dict[str, str]:
    commit = run.commit or "unknown"
    if run.commit and run.modified:
        commit += " with changes"
    settings = {f"setting {name}": str(value) for name, value in run.settings.items()}
    return {"commit": commit, "host": run.host, **run.versions, **settings}
