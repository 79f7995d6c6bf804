# SPDX-License-Identifier: Apache-2.0
"""What the problems that were tried say of option mutants that survive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from lossgate.adequacy.kills import changes, shown_in
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.cases.bound_problem import BoundProblem
from lossgate.engine.case_result import CaseResult


@dataclass(frozen=True)
class Tried:
    """What the problems with a choice say of a mutant that mistakes it."""

    problems: int
    """How many were asked."""
    change: float
    """How much the mutant changes the outputs in which it shows, relative to them, in the problem
    that came closest to killing it."""
    least: float
    """The smallest error in the scale of such an output that this problem would have shown."""

    @property
    def closest(self) -> float:
        """How close that problem came: from 1 on it may kill the mutant."""
        return self.change / self.least if self.least else inf


def tried_on(
    mutants: Iterable[OptionMutant], tried: Sequence[tuple[BoundProblem, CaseResult]]
) -> dict[OptionMutant, Tried]:
    """Returns what problems say of mutants that none of them killed.

    Args:
        mutants: those that survive.
        tried: the problems, and what came of each.
    """
    given = {mutant: [one for one in tried if _says(mutant, *one)] for mutant in mutants}
    return {mutant: _tried(mutant, own) for mutant, own in given.items()}


def _says(mutant: OptionMutant, bound: BoundProblem, result: CaseResult) -> bool:
    return not result.failure and mutant.mutate(bound.bound_spec) is not None


def _tried(mutant: OptionMutant, tried: Sequence[tuple[BoundProblem, CaseResult]]) -> Tried:
    each = [Tried(len(tried), 0.0, inf)]
    for bound, result in tried:
        outputs = shown_in(mutant.side, bound)
        least = min((c.mde for c in result.comparisons if c.output in outputs and c.values), default=inf)
        each += (Tried(len(tried), change, least) for change in changes([mutant], bound).values())
    return max(each, key=lambda one: (one.closest, one.change))
