# SPDX-License-Identifier: Apache-2.0
"""Which choice problems must have, so that a mutant shows or a goal is reached."""

from collections.abc import Mapping

from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.cases.option_strategies import ForcedOption
from lossgate.declaration.any_value import ANY
from lossgate.declaration.candidate import Candidate
from lossgate.specs.option import COMMON_OPTIONS


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
