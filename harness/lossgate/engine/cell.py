# SPDX-License-Identifier: Apache-2.0
"""A cell of the verdict table, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from lossgate.adequacy.known_mistakes import NOTHING_ASKED, MistakesShown
from lossgate.adequacy.set_cover import required_goals
from lossgate.base.layout import Layout
from lossgate.declaration.candidate import Candidate
from lossgate.diagnosis.cause import Diagnosis
from lossgate.engine.case_result import CaseResult
from lossgate.engine.property_result import PropertyResult
from lossgate.judge.pooled_output import Pooled
from lossgate.properties import PROPERTIES, Property, find_property
from lossgate.properties.registry import Resources
from lossgate.specs.coverage_goals import CoverageGoal


class Verdict(StrEnum):
    """The verdict on a cell. INCONCLUSIVE: nothing wrong was seen, and not enough was seen."""

    AGREE = "AGREE"
    DISAGREE = "DISAGREE"
    INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True, eq=False)
class Cell:
    """What is verified: one candidate, held to one property, on one layout, in one dtype, in one
    world, on one device.
    """

    candidate: Candidate
    layout: Layout
    dtype: str
    property: Property = PROPERTIES["agreement"]
    world: str = "simulated"
    device: str = "cpu"
    also: tuple[Property, ...] = ()
    """What it is held to beside, on a few of its problems, if it keeps ``property``."""

    def held_to(self, name: str) -> "Cell":
        """Returns the cell with the property of a name alone."""
        return self if name == self.property.name else replace(self, property=find_property(name), also=())

    @cached_property
    def required_goals(self) -> Mapping[str, CoverageGoal]:
        """The coverage goals that problems must reach, by name."""
        return required_goals(self.candidate, self.layout, self.dtype) if self.property.needs_adequacy else {}

    def __str__(self) -> str:
        return f"{self.candidate.name}[{self.property}-{self.layout}-{self.dtype}]"


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What came of a cell."""

    cell: Cell
    verdict: Verdict
    reasons: tuple[str, ...]
    """In words, why the verdict is not AGREE."""
    cases: tuple[CaseResult, ...]
    """The cases that count, in order."""
    failure: CaseResult | None = None
    """The smallest case found that disagrees."""
    shrink_calls: int = 0
    """Problems that were tried to make it smaller."""
    pooled: tuple[Pooled, ...] = ()
    properties: tuple[PropertyResult, ...] = ()
    """What came of the properties that it was held to beside its own."""
    covered: frozenset[str] = frozenset()
    """The coverage goals that were reached."""
    surviving: tuple[str, ...] = ()
    """The option mutants that no problem killed, by name."""
    equivalent: tuple[str, ...] = ()
    """Option mutants that changed nothing on any problem that the candidate can be given. They need
    not be killed."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished, and that none need to, in words."""
    mistakes: MistakesShown = NOTHING_ASKED
    """Which known mistakes the problems would have shown."""
    gaps: tuple[str, ...] = ()
    """In words, what else was not seen enough of."""
    untried: tuple[str, ...] = ()
    """The sizes that could not be tried. More problems do not help."""
    seconds: float = 0.0
    expected: bool = False
    """It disagrees as a known failure says."""
    printed: str = ""
    """What the candidate printed, warnings among it, if it ran in another process."""
    diagnosis: Diagnosis | None = None
    """What explains the disagreement, if it was looked for and enough problems tell."""

    @property
    def resources(self) -> Resources:
        """What a call used, if a property measured that."""
        measured = (one.resources for one in (*self.properties, *self.cases) if one.resources)
        return next(measured, {})

    @property
    def comparisons(self) -> int:
        return sum(len(case.comparisons) for case in self.cases)

    @property
    def margin(self) -> float:
        """The largest statistic of any comparison, as a share of its limit."""
        return max((c.margin for case in self.cases for c in case.comparisons), default=0.0)

    @property
    def mde(self) -> float:
        """The minimum detectable effect of the output with the least power (pooled). A metric that
        is zero on every problem, so that its scale is never compared, does not count.
        """
        return max((pooled.mde for pooled in self.pooled if pooled.problems), default=float("inf"))

    @property
    def power(self) -> dict[str, float]:
        """The share of the planted errors that were rejected, by kind."""
        rejected: dict[str, list[bool]] = {}
        for comparison in (c for case in self.cases for c in case.comparisons):
            for name, was_rejected in comparison.rejected.items():
                rejected.setdefault(name, []).append(was_rejected)
        return {name: sum(each) / len(each) for name, each in rejected.items()}

    @property
    def missing_goals(self) -> tuple[str, ...]:
        """The required coverage goals that no problem reached."""
        return tuple(name for name in self.cell.required_goals if name not in self.covered)

    @property
    def symptoms(self) -> tuple[str, ...]:
        """What identifies the disagreement, over all problems: see ``CaseResult.symptoms``."""
        cases = (*self.cases, self.failure) if self.failure is not None else self.cases
        found = {symptom for case in cases for symptom in case.symptoms}
        found |= {str(pooled.output) for pooled in self.pooled if not pooled.agrees}
        return tuple(sorted(found | {held_to.symptom for held_to in self.properties if not held_to.holds}))

    @property
    def causes(self) -> tuple[str, ...]:
        """What explains the disagreement, and what to do about it, in words."""
        return () if self.diagnosis is None else self.diagnosis.sentences

    @property
    def needs_more(self) -> bool:
        """Whether more problems may change the verdict."""
        return self.verdict is Verdict.INCONCLUSIVE and bool(self.gaps or self.surviving)

    @property
    def passes(self) -> bool:
        """Whether the cell agrees, or disagrees as a known failure says."""
        return self.verdict is Verdict.AGREE or self.expected
