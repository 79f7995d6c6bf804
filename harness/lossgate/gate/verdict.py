# SPDX-License-Identifier: Apache-2.0
"""What a gate says: whether it is open, and all that keeps it closed."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from lossgate.evidence.reader import Digested
from lossgate.evidence.records import CellKey
from lossgate.evidence.summary import CellSummary
from lossgate.gate.committed import Committed


class Kind(StrEnum):
    """Why a gate is closed."""

    DISAGREE = "disagree"
    INCONCLUSIVE = "inconclusive"
    MISSING = "missing"
    """A required cell has no evidence, or a part of a matrix is not there."""
    UNFINISHED = "unfinished"
    """A run was stopped, or its end is not there."""
    EMPTY = "empty"
    """There is no evidence of any cell."""
    DAMAGED = "damaged"
    """A line was cut or edited, or cannot be read."""
    CONTRADICTORY = "contradictory"
    """Two lines have different results of one cell, or a line contradicts its own numbers."""
    STALE = "stale"
    """Evidence is older than the policy allows, or from the future."""
    MIXED = "mixed"
    """Evidence is of several commits or versions, or of files that differ from their commit."""
    WEAK = "weak"
    """Too few problems, or too large an effect could have stayed hidden."""
    KNOWN_FAILURE = "known failure"
    """A known failure no longer fails. One that has expired, has changed or is not in the policy is
    a disagreement."""


class GateCode(IntEnum):
    """Exit codes of a gate."""

    OPEN = 0
    DISAGREE = 1
    CLOSED = 3


@dataclass(frozen=True, kw_only=True)
class Blocker:
    """One reason why the gate is closed."""

    kind: Kind
    message: str
    """What is wrong, what was expected, and what to do. It does not name the cell."""
    cell: CellKey | None = None
    """The cell that it is about; None if it is about more."""
    where: str = ""
    """``file:line`` of the evidence, or of the policy."""


@dataclass(frozen=True, kw_only=True)
class GatedCell:
    """A cell that the policy asks for or that evidence tells of."""

    key: CellKey
    summary: CellSummary | None
    """What evidence tells of it; None if it is missing."""
    required: bool = True
    """Whether a rule of the policy asks for it."""
    excused: str = ""
    """The issue of the known failure that excuses it; empty for other cells."""
    blockers: tuple[Blocker, ...] = ()

    @property
    def passes(self) -> bool:
        return not self.blockers

    @property
    def verdict(self) -> str:
        """AGREE, DISAGREE, INCONCLUSIVE, or MISSING."""
        return self.summary.verdict if self.summary is not None else "MISSING"


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """What a gate says of evidence."""

    blockers: tuple[Blocker, ...]
    """All that keeps the gate closed: what concerns everything first, then cell by cell."""
    cells: tuple[GatedCell, ...]
    """In the order of their keys."""
    policy: Digested
    evidence: tuple[Digested, ...]
    commits: tuple[str, ...]
    """Of the evidence, sorted."""
    committed: Committed
    """Whether the evidence is of files as the commits have them."""
    sources: tuple[Digested, ...]
    """The files that declare the candidates, as they were when they were verified."""
    versions: dict[str, tuple[str, ...]]
    """Each version in the evidence: of lossgate, torch, python."""

    @property
    def passes(self) -> bool:
        return not self.blockers

    @property
    def code(self) -> GateCode:
        """Only a disagreement that nothing excuses gives 1."""
        if self.passes:
            return GateCode.OPEN
        return GateCode.DISAGREE if any(b.kind is Kind.DISAGREE for b in self.blockers) else GateCode.CLOSED
