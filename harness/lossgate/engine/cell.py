# SPDX-License-Identifier: Apache-2.0
"""A cell of the verdict table, what was run in it, and what came of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from lossgate.adequacy.known_mistakes import NOTHING_ASKED, MistakesShown
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.adequacy.set_cover import required_goals
from lossgate.base.layout import Layout
from lossgate.declaration.candidate import Candidate
from lossgate.diagnosis.cause import Diagnosis
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell_record import CellRecord, PropertyRecord, Verdict
from lossgate.engine.survivors import Tried
from lossgate.properties import PROPERTIES, Property, find_property
from lossgate.properties.registry import Resources
from lossgate.specs.coverage_goals import CoverageGoal


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
class CellRun:
    """What was run in a cell: its verdict follows from it."""

    cell: Cell
    cases: tuple[CaseResult, ...]
    """The cases that count, in order."""
    failure: CaseResult | None = None
    """The smallest case found that disagrees."""
    shrink_calls: int = 0
    """Problems that were tried to make it smaller."""
    seconds: float = 0.0
    properties: tuple[PropertyRecord, ...] = ()
    """What came of the properties that it was held to beside its own."""
    surviving: Mapping[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem killed, by name."""
    equivalent: Collection[str] = ()
    """Option mutants that changed nothing on any problem that the candidate can be given. They need
    not be killed."""
    tried: Mapping[OptionMutant, Tried] = field(default_factory=dict)
    """What the problems say of the mutants that survive; nothing if nobody asked."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished, and that none need to, in words."""
    drawn: Mapping[str, int] = field(default_factory=dict)
    """How many problems were drawn for each coverage goal that was missing."""
    mistakes: MistakesShown = NOTHING_ASKED
    """Which known mistakes the problems would have shown."""
    untried: Mapping[str, str] = field(default_factory=dict)
    """The sizes that could not be tried, and why. More problems do not help."""
    resources: Resources = field(default_factory=dict)
    """What a call used, if a property measured that."""
    diagnosis: Diagnosis | None = None
    """What explains the disagreement, if it was looked for and enough problems tell."""
    expected: bool = False
    """It disagrees as a known failure says."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What came of a cell: its record, and what was run, for failure files and further runs."""

    run: CellRun
    record: CellRecord
    printed: str = ""
    """What the candidate printed, warnings among it, if it ran in another process."""

    @property
    def cell(self) -> Cell:
        return self.run.cell

    @property
    def cases(self) -> tuple[CaseResult, ...]:
        return self.run.cases

    @property
    def failure(self) -> CaseResult | None:
        return self.run.failure

    @property
    def verdict(self) -> Verdict:
        return self.record.verdict

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.record.reasons
