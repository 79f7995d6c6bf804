# SPDX-License-Identifier: Apache-2.0
"""Holds one case to a property, and records what came of it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lossgate.adequacy.kills import killed_mutants
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.base.errors import CandidateError
from lossgate.cases.assemble import KEEPS_THE_GRAPH
from lossgate.cases.case import Case
from lossgate.cases.current_case import running
from lossgate.judge.comparison import Comparison
from lossgate.problems.problem import Problem
from lossgate.properties import Property
from lossgate.properties.registry import Resources, Said
from lossgate.specs.outputs import Output
from lossgate.worlds.base import RankFailure, RankRaised


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What came of one case.

    It holds no tensors, so that it can be kept and sent to another process.
    """

    problem: Problem
    comparisons: tuple[Comparison, ...] = ()
    findings: tuple[str, ...] = ()
    """What is wrong, in words; nothing if the property holds."""
    covered: frozenset[str] = field(default_factory=frozenset)
    """The coverage goals that the problem reaches."""
    killed: frozenset[str] = field(default_factory=frozenset)
    """The option mutants that it kills, by name."""
    faults: tuple[str, ...] = ()
    """The findings that are no comparison of outputs."""
    failure: str | None = None
    """The kind of error that ended it before its outputs could be compared: a ``RankFailure``, a
    ``CandidateError`` or a crash."""
    raised: tuple[str, str] | None = None
    """The type of the exception that a rank raised, and the line."""
    unstable: bool = False
    """It disagreed, and did not when it was run again in the same process."""
    held_to: str = "agreement"
    """The property that was checked."""
    fits: bool = True
    """Whether the problem says anything about the property. If not, nothing was checked."""
    said: Mapping[str, Said] = field(default_factory=dict)
    """What the problem says of the mistakes that the property is there to find."""
    resources: Resources = field(default_factory=dict)
    """What the call used, if the property measures that."""
    side_by_side: tuple[str, ...] = ()
    """What was got beside what is wanted, in the entries that are farthest off."""
    earlier: tuple[Problem, ...] = ()
    """The problems after which it disagrees, if it does so only after others."""

    todo: str = ""
    """What to do about it, in words, if its property says so."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The findings, and what to do."""
        return (*self.findings, f"to do: {self.todo}") if self.todo else self.findings

    @property
    def says_what_to_do(self) -> bool:
        """Whether the findings do so themselves, whatever property they are of."""
        wrong = [comparison for comparison in self.comparisons if not comparison.agrees]
        lost = [any(KEEPS_THE_GRAPH in fault for fault in comparison.faults) for comparison in wrong]
        return self.failure == CandidateError.__name__ or (any(lost) and all(lost) and not self.faults)

    @property
    def symptoms(self) -> tuple[str, ...]:
        """What identifies it: outputs that disagree, other faults, or how the ranks failed."""
        if self.failure:
            return (self.failure,)
        return (*sorted(str(c.output) for c in self.comparisons if not c.agrees), *self.faults)

    @property
    def kinds(self) -> frozenset[str]:
        """What tells two failures apart: the outputs that disagree, or how the ranks failed, with
        the type of an exception. Other faults count as one, as their words may hold numbers.
        """
        if self.failure:
            return frozenset((f"{self.failure} {self.raised[0]}" if self.raised else self.failure,))
        wrong = {str(c.output) for c in self.comparisons if not c.agrees}
        return frozenset(wrong | {"fault"} if self.faults else wrong)

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
        shown = side_by_side(case) if checked.findings and held_to.needs_adequacy else ()
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
        side_by_side=shown,
    )


_OUTPUTS = 3
"""So many of the outputs that disagree are shown."""
_ENTRIES = 2
"""So many entries of each, those that are farthest off."""


def side_by_side(case: Case) -> tuple[str, ...]:
    """Returns lines with the entries of a case that are farthest off: what was got, and what is
    wanted.

    Entries are those of whole outputs, with ranks put together and padding dropped.
    """
    wrong = [comparison.output for comparison in case.comparisons if not comparison.agrees and comparison.values]
    return tuple(line for output in wrong[:_OUTPUTS] for line in _entries(case, output))


def _entries(case: Case, output: Output) -> Iterator[str]:
    got, want, counted = case.result.outputs[output], case.oracle.reference[output], case.oracle.compared(output)
    off = (got - want).abs().nan_to_num(nan=torch.inf)
    off = off.masked_fill((got == want) | (got.isnan() & want.isnan()), 0.0)
    if counted is not None:
        off = off * counted
    for number in off.flatten().topk(min(_ENTRIES, off.numel())).indices.sort().values:
        if off.flatten()[number] > 0:
            numbers = f"got {float(got.flatten()[number]):.9g}, want {float(want.flatten()[number]):.9g}"
            yield f"{_entry(output, number, off)}: {numbers}"


def _entry(output: Output, number: Tensor, of: Tensor) -> str:
    """Returns an entry in words, such as "grad of weight, vocab 3, hidden 0"."""
    at = torch.unravel_index(number, of.shape) if of.dim() else ()
    return ", ".join([str(output), *(f"{dim} {int(index)}" for dim, index in zip(output.dims, at, strict=True))])
