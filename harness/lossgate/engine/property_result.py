# SPDX-License-Identifier: Apache-2.0
"""What came of one property that a cell was held to beside agreement."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lossgate.properties.registry import Resources


@dataclass(frozen=True, kw_only=True)
class PropertyResult:
    """What came of a property, over the problems on which it was checked.

    It holds no tensors, so that it can be kept and sent to another process.
    """

    name: str
    problems: int = 0
    """On how many problems it was checked."""
    comparisons: int = 0
    """Outputs that were compared by the judge because they had other bits than the plain call."""
    margin: float = 0.0
    """The largest statistic of any comparison, as a share of its limit."""
    seconds: float = 0.0
    findings: tuple[str, ...] = ()
    """What is wrong, in words; nothing if it holds."""
    on: str = ""
    """The problem of the findings, in words."""
    remedy: str = ""
    """What to do about the findings."""
    gaps: tuple[str, ...] = ()
    """The mistakes that it is there to find and that no problem would have shown, as reasons
    against AGREE."""
    exempt: str = ""
    """Why the candidate is not held to it, as it declares."""
    resources: Resources = field(default_factory=dict)
    """What a call used, if the property measures that: on the problem of its findings, or the
    last."""

    @property
    def holds(self) -> bool:
        return not self.findings

    @property
    def symptom(self) -> str:
        """What identifies the failure of the property in a verdict."""
        return f"property {self.name}"

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings as reasons against AGREE, and what to do."""
        said = tuple(f"{self.symptom}: {finding}" for finding in self.findings)
        return (*said, f"to do: {self.remedy}") if said and self.remedy else said


def reasons_of(properties: Iterable[PropertyResult]) -> tuple[str, ...]:
    """Returns the findings of all properties as reasons against AGREE.

    The failure of a cell is that of the first that is broken. The others say on which problem.
    """
    broken = [held_to for held_to in properties if not held_to.holds]
    return tuple(
        line
        for number, held_to in enumerate(broken)
        for line in (*held_to.reasons, *([f"{held_to.symptom}: on {held_to.on}"] if number else []))
    )
