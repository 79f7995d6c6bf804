# SPDX-License-Identifier: Apache-2.0
"""The verdict of a gate: whether it is open, and every reason that keeps it closed."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Self

from lossgate.engine.cell_record import CellKey
from lossgate.evidence.reader import Digested
from lossgate.evidence.summary import CellSummary


class Committed(IntEnum):
    """Whether files were as in their commit. A worse answer is a larger number."""

    YES = 0
    UNKNOWN = 1
    """Git could not say."""
    NO = 2

    @classmethod
    def of(cls, modified: bool | None) -> "Committed":
        """Converts what evidence says: whether files differ, or None if git could not say."""
        if modified is None:
            return cls.UNKNOWN
        return cls.NO if modified else cls.YES


class GateReason(StrEnum):
    """Why a gate is closed. The gravest reason comes first, and every report keeps this order."""

    meaning: str
    """What the reason means, for people who meet it for the first time."""
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
        (
            "Run the replay command to see it again, and mend the kernel. A known failure that expired or changed "
            "excuses nothing."
        ),
    )
    PROMISE_BROKEN = (
        "promise broken",
        "The numbers of a kernel agree, but it breaks a promise: another property.",
        (
            "Run the replay command to see it again, and mend the kernel, or declare what it does not promise. Where "
            "only numbers count, write numbers_only = true in the rules of the policy that ask for the cell."
        ),
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

    @property
    def is_of_kernel(self) -> bool:
        """Whether a kernel is wrong, and not only the evidence."""
        return self in (GateReason.DISAGREE, GateReason.PROMISE_BROKEN)


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
    """The cell that the reason is about; None if it is not about a single cell."""
    where: str = ""
    """``file:line`` of the evidence, or of the policy."""

    @property
    def sentence(self) -> str:
        """The message, and what evidence says."""
        return f"{self.message}: {self.why}" if self.why else self.message


@dataclass(frozen=True, kw_only=True)
class GatedCell:
    """A cell that the policy asks for or that is in the evidence."""

    key: CellKey
    summary: CellSummary | None
    """Its newest result in the evidence; None if it is missing."""
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
        """AGREE, DISAGREE, PROMISE BROKEN, INCONCLUSIVE, or MISSING."""
        return self.summary.outcome if self.summary is not None else "MISSING"


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """The verdict of a gate on evidence."""

    general: tuple[Blocker, ...]
    """The reasons that are about no single cell."""
    cells: tuple[GatedCell, ...]
    """The cells, in the order of their keys."""
    policy: Digested
    evidence: tuple[Digested, ...]
    commits: tuple[str, ...]
    """The commits of the evidence, sorted."""
    committed: Committed
    """Whether the verified files were as in their commits."""
    sources: tuple[Digested, ...]
    """The files that declare the candidates, with their digests when they were verified."""
    versions: dict[str, tuple[str, ...]]
    """Every version in the evidence, by name, such as ``torch``."""

    @cached_property
    def blockers(self) -> tuple[Blocker, ...]:
        """All reasons: first those that are about no single cell, then those of each cell."""
        return (*self.general, *(blocker for cell in self.cells for blocker in cell.blockers))

    @property
    def passes(self) -> bool:
        return not self.blockers

    @property
    def code(self) -> GateCode:
        """The exit code. It is 1 only for a disagreement or broken promise that nothing excuses."""
        if self.passes:
            return GateCode.OPEN
        disagrees = any(blocker.reason.is_of_kernel for blocker in self.blockers)
        return GateCode.DISAGREE if disagrees else GateCode.CLOSED
