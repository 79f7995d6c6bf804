# SPDX-License-Identifier: Apache-2.0
"""What a page is made from: its cells, with what evidence and the gate say of each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

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
    """What the gate says; None for a report, which has no policy."""
    history: Mapping[CellKey, Sequence[CellRecord]]
    """Records of earlier runs of each cell, in any order; those of the current run do not count."""
    runs: Sequence[RunRecord]
    """The runs that the records name."""


class State(StrEnum):
    """What a cell's verdict is called on the page, the worst first."""

    DISAGREES = "disagrees"
    MISSING = "missing"
    INCONCLUSIVE = "inconclusive"
    KNOWN = "known failure"
    AGREES = "agrees"


SYMBOLS = {
    State.DISAGREES: "✗",
    State.MISSING: "∅",
    State.INCONCLUSIVE: "?",
    State.KNOWN: "≈",
    State.AGREES: "✓",
}
"""A shape for each state, so that no reader needs colour."""

PLURALS = {
    State.DISAGREES: "disagree",
    State.MISSING: "missing",
    State.INCONCLUSIVE: "inconclusive",
    State.KNOWN: "known failures",
    State.AGREES: "agree",
}
"""What several cells are called."""

_STATES = {
    "AGREE": State.AGREES,
    "DISAGREE": State.DISAGREES,
    "INCONCLUSIVE": State.INCONCLUSIVE,
    "MISSING": State.MISSING,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A cell of the page."""

    key: CellKey
    record: CellRecord | None
    """None if there are no numbers of it."""
    gated: GatedCell | None
    """None if the page has no gate, or the gate does not know the cell."""

    @property
    def state(self) -> State:
        if self._is_known_failure:
            return State.KNOWN
        return _STATES[self._verdict]

    @property
    def mde(self) -> float | None:
        """The minimum detectable effect; None if it is infinite or unknown."""
        source = self.record or (self.gated and self.gated.summary)
        return source.mde if source else None

    @property
    def spec(self) -> str:
        """Its spec and head; empty if they are unknown."""
        source = self.record or (self.gated and self.gated.summary)
        return f"{source.spec} from {source.head}" if source else ""

    @property
    def comparisons(self) -> int:
        source = self.record or (self.gated and self.gated.summary)
        return source.comparisons if source else 0

    @property
    def has_verdict(self) -> bool:
        return self.state is not State.MISSING

    @property
    def blockers(self) -> Sequence[Blocker]:
        return self.gated.blockers if self.gated is not None else ()

    @property
    def needs_attention(self) -> bool:
        """Whether a reader should look at it: it blocks, or without a gate it does not agree."""
        if self.gated is not None:
            return not self.gated.passes
        return self.state not in (State.AGREES, State.KNOWN)

    @property
    def reasons(self) -> Sequence[str]:
        """In words, why it does not agree."""
        source = self.record or (self.gated and self.gated.summary)
        return source.reasons if source else ()

    @property
    def _verdict(self) -> str:
        return self.gated.verdict if self.gated is not None else self.record.verdict if self.record else "MISSING"

    @property
    def _is_known_failure(self) -> bool:
        if self.gated is not None and self.gated.excused:
            return True
        known = self.record.known_failure if self.record else None
        return self._verdict == "DISAGREE" and known is not None and known.expected


def entries_of(page: Page) -> list[Entry]:
    """Returns the cells of a page, in the order of their keys."""
    records = {record.key: record for record in page.cells}
    gated = {cell.key: cell for cell in page.gate.cells} if page.gate is not None else {}
    return [Entry(key=key, record=records.get(key), gated=gated.get(key)) for key in sorted({*records, *gated})]


def count_states(entries: Sequence[Entry]) -> list[tuple[State, int]]:
    """Returns how many cells are in each state, the worst state first."""
    counts = Counter(entry.state for entry in entries)
    return [(state, counts[state]) for state in State if counts[state]]
