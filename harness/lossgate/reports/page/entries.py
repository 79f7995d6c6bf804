# SPDX-License-Identifier: Apache-2.0
"""The data of a page: its cells, each with its evidence and the verdict of the gate on it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from math import prod
from re import findall

from lossgate.engine.cell_record import CellKey, CellRecord
from lossgate.evidence.records import RunRecord
from lossgate.gate.gate_verdict import Blocker, GatedCell, GateVerdict


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the page shows. The same page always gives the same bytes."""

    title: str
    cells: Sequence[CellRecord]
    """The newest record of each cell."""
    gate: GateVerdict | None
    """The verdict of the gate; None for a report, which has no policy."""
    history: Mapping[CellKey, Sequence[CellRecord]]
    """Earlier records of each cell, in any order. Records of the current run are ignored."""
    runs: Sequence[RunRecord]
    """The runs that the records name."""


class State(StrEnum):
    """The verdict on a cell in the words of the page, the worst first."""

    DISAGREES = "disagrees"
    BROKEN = "promise broken"
    MISSING = "missing"
    INCONCLUSIVE = "inconclusive"
    KNOWN = "known failure"
    AGREES = "agrees"


SYMBOLS = {
    State.DISAGREES: "✗",
    State.BROKEN: "△",
    State.MISSING: "∅",
    State.INCONCLUSIVE: "?",
    State.KNOWN: "≈",
    State.AGREES: "✓",
}
"""A shape for each state, so that no reader needs colour."""

PLURALS = {
    State.DISAGREES: "disagree",
    State.BROKEN: "break promises",
    State.MISSING: "missing",
    State.INCONCLUSIVE: "inconclusive",
    State.KNOWN: "known failures",
    State.AGREES: "agree",
}
"""The words for several cells."""

_STATES = {
    "AGREE": State.AGREES,
    "DISAGREE": State.DISAGREES,
    "PROMISE BROKEN": State.BROKEN,
    "INCONCLUSIVE": State.INCONCLUSIVE,
    "MISSING": State.MISSING,
}


@dataclass(frozen=True, kw_only=True)
class PageCell:
    """A cell of the page."""

    key: CellKey
    record: CellRecord | None
    """The newest record of the cell; None if the page has none."""
    gated: GatedCell | None
    """The cell as the gate judged it; None if there is no gate or it does not know the cell."""

    @property
    def source(self) -> CellRecord | None:
        """The record, or else the summary of the gate; None if there is neither."""
        if self.record is not None:
            return self.record
        return self.gated.summary if self.gated is not None else None

    @property
    def state(self) -> State:
        if self._is_known_failure:
            return State.KNOWN
        return _STATES[self._verdict]

    @property
    def mde(self) -> float | None:
        """The minimum detectable effect; None if it is infinite or unknown."""
        return self.source.mde if self.source is not None else None

    @property
    def spec(self) -> str:
        """The spec and head of the cell; empty if they are unknown."""
        return f"{self.source.spec} from {self.source.head}" if self.source is not None else ""

    @property
    def comparisons(self) -> int:
        return self.source.comparisons if self.source is not None else 0

    @property
    def has_verdict(self) -> bool:
        return self.state is not State.MISSING

    @property
    def blockers(self) -> Sequence[Blocker]:
        return self.gated.blockers if self.gated is not None else ()

    @property
    def needs_attention(self) -> bool:
        """Whether the cell closes the gate, or without a gate, does not agree."""
        if self.gated is not None:
            return not self.gated.passes
        return self.state not in (State.AGREES, State.KNOWN)

    @property
    def reasons(self) -> Sequence[str]:
        """Why the cell does not agree, in words."""
        return self.source.told if self.source is not None else ()

    @property
    def _verdict(self) -> str:
        if self.gated is not None:
            return self.gated.verdict
        return self.record.outcome if self.record is not None else "MISSING"

    @property
    def _is_known_failure(self) -> bool:
        if self.gated is not None and self.gated.excused:
            return True
        is_expected = self.record is not None and self.record.expected
        return is_expected and self._verdict in ("DISAGREE", "PROMISE BROKEN")


def entries_of(page: Page) -> list[PageCell]:
    """Returns the cells of a page, in the order of their keys."""
    records = {record.key: record for record in page.cells}
    gated = {cell.key: cell for cell in page.gate.cells} if page.gate is not None else {}
    return [PageCell(key=key, record=records.get(key), gated=gated.get(key)) for key in sorted({*records, *gated})]


def count_states(entries: Sequence[PageCell]) -> list[tuple[State, int]]:
    """Returns how many cells are in each state, the worst state first."""
    counts = Counter(entry.state for entry in entries)
    return [(state, counts[state]) for state in State if counts[state]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The cells of a candidate that differ only in their layout."""

    property: str
    dtype: str
    where: str
    """The world and device; empty for simulated ranks on the CPU."""
    cells: Sequence[int | None]
    """The number of the entry for each layout; None if there is no such cell."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of a candidate."""

    candidate: str
    about: str
    """The spec and head of the candidate; empty if they are unknown."""
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class CellTable:
    """All cells of a page."""

    layouts: Sequence[str]
    groups: Sequence[Group]


def matrix_of(entries: Sequence[PageCell]) -> CellTable:
    """Returns the matrix of entries. The entries must be in the order of their keys."""
    layouts = sorted({entry.key.layout for entry in entries}, key=_by_size)
    column = {layout: number for number, layout in enumerate(layouts)}
    groups = groupby(enumerate(entries), key=lambda numbered: numbered[1].key.candidate)
    return CellTable(layouts=layouts, groups=[_group(name, list(cells), column) for name, cells in groups])


def _by_size(layout: str) -> tuple[int, int, str]:
    """A key that sorts layouts by their ranks, then by the number of their axes."""
    sizes = [int(size) for size in findall(r"=(\d{1,9})", layout)]
    return prod(sizes), len(sizes), layout


def _group(candidate: str, cells: Sequence[tuple[int, PageCell]], column: Mapping[str, int]) -> Group:
    abouts = dict.fromkeys(entry.spec for _, entry in cells if entry.spec)
    return Group(candidate=candidate, about="; ".join(abouts), rows=list(_rows(cells, column)))


def _rows(cells: Iterable[tuple[int, PageCell]], column: Mapping[str, int]) -> Iterator[Row]:
    rows: dict[tuple[str, str, str], list[int | None]] = {}
    for number, entry in cells:
        key = entry.key
        row = rows.setdefault((key.property, key.dtype, key.place), [None] * len(column))
        row[column[key.layout]] = number
    for (property_, dtype, place), numbers in sorted(rows.items()):
        yield Row(property=property_, dtype=dtype, where=place, cells=numbers)
