# SPDX-License-Identifier: Apache-2.0
"""A cell of the verdict table, what was run in it, and its result."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from lossgate.adequacy.kills import changes, shown_in
from lossgate.adequacy.known_mistakes import NOTHING_ASKED, MistakesShown
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.adequacy.set_cover import required_goals
from lossgate.base.layout import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.declaration.candidate import Candidate
from lossgate.diagnosis.cause import Diagnosis
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell_record import CellRecord, PropertyRecord, Verdict
from lossgate.properties import PROPERTIES, Property, find_property
from lossgate.properties.registry import Resources
from lossgate.specs.coverage_goals import CoverageGoal


@dataclass(frozen=True)
class Tried:
    """How close the problems with a choice came to killing a mutant that mistakes the choice.

    ``change`` and ``least`` are those of the problem that came closest.
    """

    problems: int
    """How many problems have the choice."""
    change: float
    """How much the mutant changes the outputs in which it shows, relative to their size."""
    least: float
    """The smallest error in the scale of such an output that the problem would have shown."""

    @property
    def closest(self) -> float:
        """The change as a share of ``least``. From 1 on, the problem may kill the mutant."""
        return self.change / self.least if self.least else inf


def tried_on(
    mutants: Iterable[OptionMutant], tried: Sequence[tuple[BoundProblem, CaseResult]]
) -> dict[OptionMutant, Tried]:
    """Returns how close problems came to killing mutants that none of them killed.

    Args:
        mutants: the surviving mutants.
        tried: the problems and their results.
    """
    return {mutant: _closest(mutant, [one for one in tried if _says(mutant, *one)]) for mutant in mutants}


def _says(mutant: OptionMutant, bound: BoundProblem, result: CaseResult) -> bool:
    """Returns whether a problem has the choice of a mutant, and was compared."""
    return not result.failure and mutant.mutate(bound.bound_spec) is not None


def _closest(mutant: OptionMutant, tried: Sequence[tuple[BoundProblem, CaseResult]]) -> Tried:
    """Returns the numbers of the problem that came closest to killing a mutant."""
    found = [Tried(len(tried), 0.0, inf)]
    for bound, result in tried:
        outputs = shown_in(mutant.side, bound)
        least = min((c.mde for c in result.comparisons if c.output in outputs and c.values), default=inf)
        found += (Tried(len(tried), change, least) for change in changes([mutant], bound).values())
    return max(found, key=lambda one: (one.closest, one.change))


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
    hidden_by_exclusions: Collection[str] = ()
    """Option mutants that change nothing on those problems alone. They must be killed: the
    candidate says that it supports the option."""
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
    beside: str = ""
    """What lies beside the known failure, in words; "" if that was not judged."""
    remark: str = ""
    """What happened in the run beside the verdict, in words that follow the name of the cell."""


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
    def is_of_known_failure(self) -> bool:
        """Whether nothing was found that is wrong beside the known failure of the candidate."""
        return self.cell.candidate.known_failure is not None and (self.record.expected or not self.run.beside)

    @property
    def verdict(self) -> Verdict:
        return self.record.verdict

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.record.reasons
