# SPDX-License-Identifier: Apache-2.0
"""A cell of the verdict table, what was run in it, and its result."""

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
    """A unit of verification: a candidate and a property on a layout, dtype, world and device."""

    candidate: Candidate
    layout: Layout
    dtype: str
    property: Property = PROPERTIES["agreement"]
    world: str = "simulated"
    device: str = "cpu"
    also: tuple[Property, ...] = ()
    """Further properties, which are checked on a few of the problems if the candidate keeps
    ``property``.
    """

    def held_to(self, name: str) -> "Cell":
        """Returns the same cell with the named property alone."""
        return self if name == self.property.name else replace(self, property=find_property(name), also=())

    @cached_property
    def required_goals(self) -> Mapping[str, CoverageGoal]:
        """The coverage goals that problems must reach, by name."""
        return required_goals(self.candidate, self.layout, self.dtype) if self.property.needs_adequacy else {}

    def __str__(self) -> str:
        return f"{self.candidate.name}[{self.property}-{self.layout}-{self.dtype}]"


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """Everything that was run in a cell. The verdict follows from it."""

    cell: Cell
    cases: tuple[CaseResult, ...]
    """The results of the problems in order, up to the first that disagrees."""
    failure: CaseResult | None = None
    """The smallest case found that disagrees."""
    shrink_calls: int = 0
    """How many problems were tried to make the failing one smaller."""
    seconds: float = 0.0
    properties: tuple[PropertyRecord, ...] = ()
    """The results of the further properties."""
    surviving: Mapping[str, OptionMutant] = field(default_factory=dict)
    """The option mutants that no problem killed, by name."""
    equivalent: Collection[str] = ()
    """Option mutants that changed nothing on any problem that the candidate can be given. They need
    not be killed."""
    tried: Mapping[OptionMutant, Tried] = field(default_factory=dict)
    """How close the problems came to killing each surviving mutant. It is empty unless the cell is
    inconclusive."""
    not_distinguished: tuple[str, ...] = ()
    """Choices of options that no problem distinguished, and that need not be, in words."""
    drawn: Mapping[str, int] = field(default_factory=dict)
    """How many problems were drawn for each coverage goal that was missing."""
    mistakes: MistakesShown = NOTHING_ASKED
    """Which known mistakes the problems would have shown."""
    untried: Mapping[str, str] = field(default_factory=dict)
    """The sizes that could not be tried, and why."""
    resources: Resources = field(default_factory=dict)
    """The memory and traffic of a call, if a property measured them."""
    diagnosis: Diagnosis | None = None
    """The explanation of the disagreement, if there is one."""
    expected: bool = False
    """Whether the cell disagrees in the way that a known failure expects."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """The record of a cell, and what was run in it."""

    run: CellRun
    record: CellRecord
    printed: str = ""
    """The output and warnings of the candidate, if it ran in another process."""

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
