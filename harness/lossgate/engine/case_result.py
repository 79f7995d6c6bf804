# SPDX-License-Identifier: Apache-2.0
"""Checks a property on one case, and records the result."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lossgate.adequacy.kills import killed_mutants
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.base.errors import CandidateError
from lossgate.cases.case import Case
from lossgate.cases.current_case import running
from lossgate.engine.cell_record import with_todo_second
from lossgate.judge.comparison import MANNERS, Comparison, Manner
from lossgate.judge.explain import explain_statistics
from lossgate.problems.problem import Problem
from lossgate.properties import Property
from lossgate.properties.registry import Resources, Said
from lossgate.worlds.base import RankFailure, RankRaised


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The result of one case. It has no tensors, so it can be kept and sent to other processes."""

    problem: Problem
    comparisons: tuple[Comparison, ...] = ()
    findings: tuple[str, ...] = ()
    """What is wrong, in words. It is empty if the property holds."""
    covered: frozenset[str] = field(default_factory=frozenset)
    """The coverage goals that the problem reaches."""
    killed: frozenset[str] = field(default_factory=frozenset)
    """The option mutants that it kills, by name."""
    faults: tuple[str, ...] = ()
    """The findings that do not come from comparing outputs."""
    failure: str | None = None
    """The kind of error that ended the case before outputs could be compared: a ``RankFailure``, a
    ``CandidateError`` or a crash."""
    raised: tuple[str, str] | None = None
    """The type of the exception that a rank raised, and the line."""
    unstable: bool = False
    """Whether the case disagreed at first, but not when it was run again in the same process."""
    draws: bool = False
    """Whether the kernel draws random numbers. It is found out in a second look alone."""
    held_to: str = "agreement"
    """The name of the property that was checked."""
    fits: bool = True
    """Whether the problem says anything about the property. If not, nothing was checked."""
    said: Mapping[str, Said] = field(default_factory=dict)
    """Whether the problem would show each of the property's own mistakes, by their sentences."""
    resources: Resources = field(default_factory=dict)
    """The memory and traffic of the call, if the property measures them."""
    earlier: tuple[Problem, ...] = ()
    """Problems that must run first for the case to disagree. Empty if it needs none."""

    todo: str = ""
    """What to do about the failure, in words; "" if the property gives no advice."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings. What to do comes after the first."""
        return with_todo_second(self.findings, self.todo)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics over their limit of outputs whose numbers the findings show, in words."""
        shown = (comparison for comparison in self.comparisons if comparison.farthest)
        return tuple(line for comparison in shown for line in explain_statistics(comparison))

    @property
    def says_what_to_do(self) -> bool:
        """Whether the findings themselves say what to do, so that no advice need be added."""
        return self.failure == CandidateError.__name__

    @property
    def manner(self) -> Manner:
        """In which way the kernel fails: the one to tell first, if there are several."""
        if self.failure == RankRaised.__name__:
            return "raises"
        found = {comparison.manner for comparison in self.comparisons if not comparison.agrees}
        return next(manner for manner in MANNERS if manner in {*found, "wrong"})

    @property
    def symptoms(self) -> tuple[str, ...]:
        """The outputs that disagree and other faults, or how the ranks failed."""
        if self.failure:
            return (self.failure,)
        return (*sorted(self._wrong_outputs), *self.faults)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of failure: the outputs that disagree, or how the ranks failed, with the type
        of an exception. All other faults are one kind, because their words may hold numbers.
        """
        if self.failure:
            return frozenset((f"{self.failure} {self.raised[0]}" if self.raised else self.failure,))
        return frozenset((*self._wrong_outputs, "fault") if self.faults else self._wrong_outputs)

    @property
    def _wrong_outputs(self) -> list[str]:
        return [str(comparison.output) for comparison in self.comparisons if not comparison.agrees]

    @property
    def agrees(self) -> bool:
        return not self.findings


def run_case(case: Case, held_to: Property, mutants: Iterable[OptionMutant] = ()) -> CaseResult:
    """Runs a case and checks a property.

    Args:
        case: the candidate, the problem and the world.
        held_to: the property.
        mutants: the option mutants that no problem has killed yet.
    """
    name = held_to.name
    try:
        with running(case.problem, name):
            if not held_to.fits(case):
                return CaseResult(problem=case.problem, held_to=name, fits=False)
            checked = held_to.check(case)
            if checked.says_nothing:
                return CaseResult(problem=case.problem, held_to=name, fits=False)
        killed = frozenset(str(mutant) for mutant in killed_mutants(mutants, case))
    except (RankFailure, CandidateError) as failure:
        kind = type(failure).__name__
        raised = (failure.kind, failure.site) if isinstance(failure, RankRaised) else None
        return CaseResult(problem=case.problem, findings=(str(failure),), failure=kind, raised=raised, held_to=name)
    return CaseResult(
        problem=case.problem,
        comparisons=checked.comparisons,
        findings=checked.findings,
        covered=case.placed.coverage,
        killed=killed,
        faults=checked.faults,
        held_to=name,
        resources=checked.resources,
    )
