# SPDX-License-Identifier: Apache-2.0
"""What a gate says: whether it is open, and all that keeps it closed."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Self

from lossgate.evidence.reader import Digested
from lossgate.evidence.records import CellKey
from lossgate.evidence.summary import CellSummary


class Committed(IntEnum):
    """Whether files were as in their commit; the worse, the larger."""

    YES = 0
    UNKNOWN = 1
    """Git could not say."""
    NO = 2

    @classmethod
    def of(cls, modified: bool | None) -> Self:
        """Returns it of what evidence says: whether files differ, or None if git could not say."""
        return cls({False: cls.YES, None: cls.UNKNOWN, True: cls.NO}[modified])


class GateReason(StrEnum):
    """Why a gate is closed, the gravest reason first. Everything that shows reasons shows them in
    this order.
    """

    meaning: str
    """What it means, for people who meet it for the first time."""
    way_out: str
    """What to do about it."""

    def __new__(cls, word: str, meaning: str, way_out: str) -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning, member.way_out = meaning, way_out
        return member

    DISAGREE = (
        "disagree",
        "A kernel disagrees with its reference, and no known failure of the policy excuses it.",
        "Run the replay command to see it again, and mend the kernel. A known failure that expired or changed is none.",
    )
    KNOWN_FAILURE = (
        "known failure",
        "A known failure no longer fails.",
        "Remove it from the policy, and from the candidate if that declares it.",
    )
    CONTRADICTORY = (
        "contradictory",
        "Two lines have different results of one cell, or a line contradicts its own numbers.",
        "Use a new file for each commit: remove the evidence that is out of date, or verify the cell again.",
    )
    DAMAGED = (
        "damaged",
        "A line of evidence was cut or edited, or can't be read.",
        "Verify again, and carry the file unchanged from the run to the gate.",
    )
    EMPTY = ("empty", "There is no evidence.", "Check the paths of the evidence.")
    MISSING = (
        "missing",
        "Evidence that the policy requires is not there.",
        "Verify the missing cells, and give the gate the evidence of every part of the matrix.",
    )
    UNFINISHED = (
        "unfinished",
        "A run was stopped, or its end is not in the evidence.",
        "Let the run come to its end, and give the gate its whole file.",
    )
    MIXED = (
        "mixed",
        "Evidence is of several commits or versions, or of files that differ from their commit.",
        "Verify everything at one commit, with one set of versions, in a clean checkout.",
    )
    STALE = (
        "stale",
        "Evidence is older than the policy allows, or is dated in the future.",
        "Verify again; check the clock of the machine if the date is in the future.",
    )
    INCONCLUSIVE = (
        "inconclusive",
        "Nothing wrong was seen, but not enough was seen.",
        "Verify again with more examples, or drop options from supports that the kernel doesn't need.",
    )
    WEAK = (
        "weak",
        "Too few problems were judged, or too large an effect could have stayed hidden.",
        "Verify with more examples, or ask less of these cells in the policy.",
    )


class GateCode(IntEnum):
    """Exit codes of a gate."""

    OPEN = 0
    DISAGREE = 1
    CLOSED = 3


@dataclass(frozen=True, kw_only=True)
class Blocker:
    """One reason why the gate is closed."""

    reason: GateReason
    message: str
    """What is wrong, what was expected, and what to do. It does not name the cell."""
    why: str = ""
    """What evidence says of the cell, in one line; empty if the message says it all."""
    cell: CellKey | None = None
    """The cell that it is about; None if it is about more."""
    where: str = ""
    """``file:line`` of the evidence, or of the policy."""

    @property
    def sentence(self) -> str:
        """The message, and what evidence says."""
        return f"{self.message}: {self.why}" if self.why else self.message


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

    general: tuple[Blocker, ...]
    """What keeps the gate closed and is about no single cell."""
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

    @cached_property
    def blockers(self) -> tuple[Blocker, ...]:
        """All that keeps the gate closed: what is about no single cell first, then cell by cell."""
        return (*self.general, *(blocker for cell in self.cells for blocker in cell.blockers))

    @property
    def passes(self) -> bool:
        return not self.blockers

    @property
    def code(self) -> GateCode:
        """Only a disagreement that nothing excuses gives 1."""
        if self.passes:
            return GateCode.OPEN
        return GateCode.DISAGREE if any(b.reason is GateReason.DISAGREE for b in self.blockers) else GateCode.CLOSED
