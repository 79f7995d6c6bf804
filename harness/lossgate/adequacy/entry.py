# SPDX-License-Identifier: Apache-2.0
"""A problem of a deck, and the same on a layout."""

from collections.abc import Mapping
from dataclasses import dataclass

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.placement import Placement
from lossgate.problems.problem import Problem


@dataclass(frozen=True, eq=False)
class Entry:
    """A problem of a deck."""

    bound: BoundProblem
    drawn: Problem
    """As it was drawn: that of ``bound``, unless its vocabulary was made to fit."""
    draws: Draws
    """What it was drawn with, so that it can be made smaller."""
    kills: Mapping[str, float]
    """How much each mutant that it is likely to kill changes it, by the mutant's name. Mutants that
    enough other problems kill were not asked about."""


@dataclass(frozen=True, eq=False)
class Placed:
    """An entry on a layout."""

    entry: Entry
    placement: Placement
    goals: frozenset[str]
    """The goals that it reaches."""

    @property
    def problem(self) -> Problem:
        """The problem with its layout."""
        return self.placement.put(self.entry.bound.problem)
