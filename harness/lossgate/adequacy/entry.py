# SPDX-License-Identifier: Apache-2.0
"""A problem of a deck: as it is used, on a layout, and as it is kept on disk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.option_strategies import ForcedOption
from lossgate.cases.placement import Placement
from lossgate.declaration.candidate import Candidate
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


class _KeptDraws(msgspec.Struct, frozen=True):
    """With what problems were drawn."""

    seed: str
    count: int
    targets: tuple[tuple[str, tuple[Any, ...]] | None, ...]
    rich: bool


class KeptEntries(msgspec.Struct, frozen=True):
    """Problems of ordinary size, and what each is good for."""

    draws: list[_KeptDraws]
    entries: list[tuple[int, str, dict[str, float]]]
    """Of each its draws, the problem as JSON, and its kills."""
    drawn: int = 0
    """How many were drawn to find them."""
    equivalent: dict[str, bool] = {}
    """See ``equivalent_mutants``."""

    @classmethod
    def of(
        cls, entries: Sequence[Entry], *, drawn: int = 0, equivalent: dict[str, bool] | None = None
    ) -> "KeptEntries":
        """Returns what is kept of entries."""
        draws = list(dict.fromkeys(map(_kept, (entry.draws for entry in entries))))
        own = [(draws.index(_kept(entry.draws)), entry.drawn.to_json(), dict(entry.kills)) for entry in entries]
        return cls(draws, own, drawn, equivalent or {})

    def again(self, candidate: Candidate, dtype: str) -> list[Entry]:
        """Returns the entries for a candidate that declares what the one did that they are of."""
        draws = [_again(one, candidate, dtype) for one in self.draws]
        problems = [(number, Problem.from_json(text), kills) for number, text, kills in self.entries]
        return [
            Entry(BoundProblem(candidate.spec, problem), problem, draws[number], kills)
            for number, problem, kills in problems
        ]


def _kept(draws: Draws) -> _KeptDraws:
    targets = tuple(None if target is None else (target.option, target.values) for target in draws.targets)
    return _KeptDraws(draws.seed, draws.count, targets, draws.rich)


def _again(kept: _KeptDraws, candidate: Candidate, dtype: str) -> Draws:
    targets = tuple(None if target is None else ForcedOption(*target) for target in kept.targets)
    return Draws(candidate, dtype, kept.seed, kept.count, targets, kept.rich)
