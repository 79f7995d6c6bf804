# SPDX-License-Identifier: Apache-2.0
"""How close the problems that were tried came to killing the option mutants that survive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from lossgate.adequacy.kills import changes, shown_in
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.cases.bound_problem import BoundProblem
from lossgate.engine.case_result import CaseResult


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
