# SPDX-License-Identifier: Apache-2.0
"""Draws problems for a deck: with choices that mutants or goals need, and what each may kill."""

from collections.abc import Collection, Mapping

from lossgate.adequacy.entry import Entry
from lossgate.adequacy.kills import changes
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.option_strategies import ForcedOption
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY
from lossgate.specs.option import COMMON_OPTIONS

LEAST_CHANGE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01, "tf32": 0.01}
"""The change of a reference, relative to its largest entry, from which on a problem is likely to
kill a mutant. It depends on the coarsest format to which kernels round."""

NEAR_SHARE = 1e-3
"""The share of that change from which on a problem may tell numbers apart that are near each other.
In float32 it is 1e-6: a difference below 16 units of roundoff does not show."""


class EntryDrawer:
    """Draws the problems of one deck."""

    def __init__(
        self,
        candidate: Candidate,
        dtype: str,
        key: str,
        mutants: Mapping[str, OptionMutant],
        near: Mapping[str, OptionMutant],
    ) -> None:
        """Remembers what a deck draws for.

        Args:
            candidate: whose declaration says which problems can be drawn.
            dtype: of its inputs.
            key: decks with other keys draw other problems.
            mutants: those that problems must kill, by name.
            near: those that problems need not kill, because their choices are nearly one number.
        """
        self._candidate, self._dtype, self._key = candidate, dtype, key
        self._near, self._known = near, {**mutants, **near}

    def draws(self, what: str, count: int, *targets: ForcedOption | None, rich: bool = False) -> Draws:
        """Prepares to draw problems, the same ones whenever it is for the same purpose.

        Args:
            what: names the purpose.
            count: the most problems.
            targets: the choices that problems must have, in turn.
            rich: whether nearly all are of middle size and have trained tokens.
        """
        return Draws(self._candidate, self._dtype, f"{self._key} {what}", count, targets or (None,), rich)

    def problems(self, draws: Draws) -> list[BoundProblem]:
        """Draws problems, each once."""
        distinct = {problem.to_json(): problem for problem in draws.all()}.values()
        return [BoundProblem(self._candidate.spec, problem) for problem in distinct]

    def entry(self, bound: BoundProblem, draws: Draws, mutants: Collection[str]) -> Entry:
        """Returns a problem that was drawn, and which of some mutants it is likely to kill."""
        return Entry(bound, bound.problem, draws, self.likely(bound, mutants))

    def entries(
        self, what: str, count: int, target: ForcedOption | None, mutants: Collection[str], *, rich: bool = False
    ) -> list[Entry]:
        """Draws problems and asks which of some mutants each is likely to kill."""
        draws = self.draws(what, count, target, rich=rich)
        return [self.entry(bound, draws, mutants) for bound in self.problems(draws)]

    def likely(self, bound: BoundProblem, mutants: Collection[str], *, unmasked: bool = False) -> dict[str, float]:
        """Returns the mutants that a problem is likely to kill, and how much each changes it.

        Args:
            bound: the problem.
            mutants: the names of those that are asked about.
            unmasked: whether to ask before tokens near a kink are masked, which is quicker.
        """
        asked = changes([self._known[name] for name in sorted(mutants)], bound, unmasked=unmasked)
        least = LEAST_CHANGE[self._candidate.coarsest(self._dtype)]
        return {
            name: change
            for name, change in ((str(mutant), change) for mutant, change in asked.items())
            if change >= (least * NEAR_SHARE if name in self._near else least)
        }


def target_of(name: str, mutants: Mapping[str, OptionMutant]) -> ForcedOption | None:
    """Returns the choice that a mutant mistakes; None if candidates support no other.

    Args:
        name: of the mutant.
        mutants: it and all others, by name.
    """
    mutant = mutants[name]
    choices = {other.values for other in mutants.values() if other.option == mutant.option}
    return mutant.target if len(choices) > 1 else None


def by_target(mutants: Mapping[str, OptionMutant]) -> dict[ForcedOption | None, set[str]]:
    """Returns the mutants by what problems must have for them to show; None for nothing."""
    found: dict[ForcedOption | None, set[str]] = {None: set()}
    for name in mutants:
        found.setdefault(target_of(name, mutants), set()).add(name)
    return found


def target_for(goal: str, candidate: Candidate) -> ForcedOption | None:
    """Returns a choice without which a goal cannot be reached; None if there is none."""
    for scenario in candidate.spec.scenarios:
        for value in scenario.choices:
            if goal == f"{scenario.name}: {value}":
                return ForcedOption(scenario.name, (value,))
    for option, unreachable in candidate.spec.all_goals[goal].unreachable_if.items():
        if option not in candidate.spec.supported_options or option in COMMON_OPTIONS:  # drawn often anyway
            continue
        supported = candidate.supported(option)
        drawn = candidate.spec.supported_options[option].drawn if supported is ANY else supported
        reachable = tuple(value for value in drawn if value not in unreachable)
        if len(reachable) < len(drawn):
            return ForcedOption(option, reachable)
    return None
