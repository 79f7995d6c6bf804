# SPDX-License-Identifier: Apache-2.0
"""What a policy says, as classes."""

import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from lossgate.evidence.records import CellKey
from lossgate.gate.patterns import Demand, KnownCells, Patterns, any_fits, demands
from lossgate.judge.pooling import LARGEST_MDE


@dataclass(frozen=True, kw_only=True)
class EvidenceRules:
    """What all evidence must be like."""

    max_age: timedelta | None = None
    """None allows any age."""
    same_commit: bool = True
    """All evidence must be of one commit."""
    unmodified: bool = False
    """Evidence from a checkout whose files differ from its commit is refused."""
    same_versions: tuple[str, ...] = ("lossgate", "torch")
    """The names in ``RunRecord.versions`` that must be the same in all evidence."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A ``[[require]]``: cells that a release needs, and how well they must have been seen."""

    line: int
    """Where it begins in the policy."""
    candidates: Patterns
    properties: Patterns = ("*",)
    layouts: Patterns = ("*",)
    dtypes: Patterns = ("*",)
    worlds: Patterns = ("simulated",)
    devices: Patterns = ("cpu",)
    min_problems: int = 1
    """The least problems of a cell."""
    max_mde: float = LARGEST_MDE
    """The greatest minimum detectable effect of a cell."""
    keeps: tuple[str, ...] = ()
    """The properties that a cell must have been held to beside its own."""
    lines_of_keeps: tuple[int, ...] = ()
    """The line of each of them in the policy."""

    @property
    def others(self) -> tuple[Patterns, ...]:
        """The patterns beside those for candidates, in the order of a cell's key."""
        return self.properties, self.layouts, self.dtypes, self.worlds, self.devices

    def matches(self, key: CellKey) -> bool:
        """Returns whether the rule holds for a cell. For many cells, ``demands`` is quicker."""
        return (
            any_fits(self.candidates, key.candidate)
            and any_fits(self.properties, key.property)
            and any_fits(self.layouts, key.layout)
            and any_fits(self.dtypes, key.dtype)
            and any_fits(self.worlds, key.world)
            and any_fits(self.devices, key.device)
        )

    def demands(self, known: KnownCells) -> Iterator[Demand]:
        """Yields what the rule asks for, each with the cells that meet it."""
        return demands(self.candidates, self.others, known)


@dataclass(frozen=True, kw_only=True)
class KnownFailureRule:
    """A ``[[known_failure]]``: a cell that may disagree for a while, as its frozen example does."""

    line: int
    """Where it begins in the policy."""
    candidate: str
    property: str = "agreement"
    layout: str
    dtype: str
    world: str = "simulated"
    device: str = "cpu"
    name: str
    """The heading under which a document describes it."""
    example: Path
    """The frozen failure file."""
    example_digest: str
    """Its SHA-256, as ``KnownFailureRecord.example`` has it."""
    symptoms: tuple[str, ...]
    """What identifies the disagreement of the frozen example, such as the outputs it shows in."""
    issue: str
    owner: str
    expires: date
    """The last day on which it excuses the cell."""

    @builtins.property
    def key(self) -> CellKey:
        return CellKey(self.candidate, self.property, self.layout, self.dtype, self.world, self.device)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a release needs."""

    file: Path
    sha256: str
    evidence: EvidenceRules
    require: tuple[Rule, ...]
    known_failures: tuple[KnownFailureRule, ...]

    def where(self, rule: Rule | KnownFailureRule) -> str:
        """Returns the place of a rule, as ``ci/gate.toml:12``."""
        return f"{self.file}:{rule.line}"
