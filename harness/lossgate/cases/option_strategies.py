# SPDX-License-Identifier: Apache-2.0
"""Draws the options of a problem with Hypothesis: options that a candidate supports and that are
valid together.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from lossgate.base.errors import UsageError
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY
from lossgate.specs.option import Option
from lossgate.specs.spec import Spec


@dataclass(frozen=True)
class ForcedOption:
    """An option or scenario that must have one of some values."""

    option: str
    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.option}={'/'.join(map(str, self.values))}"


@st.composite
def draw_options(draw: DrawFn, candidate: Candidate, target: ForcedOption | None) -> dict[str, Any]:
    """Draws options that are valid together, and returns those that are not at their default."""
    spec = candidate.spec
    options = {option.name: option for option in spec.options}
    grouped = {name for group in spec.option_groups for name in group}
    groups = [*spec.option_groups, *((name,) for name in options if name not in grouped)]
    if target is not None:  # its own group comes first, because later groups give way to earlier ones
        groups.sort(key=lambda group: target.option not in group)
    chosen: dict[str, Any] = {}
    for group in groups:
        forced = target if target is not None and target.option in group else None
        if forced is not None:
            combination = draw(one_of(_group_combinations(candidate, group, forced)))
        elif len(group) == 1:
            (name,) = group
            combination = ((name, draw(draw_value(options[name], candidate.supported(name)))),)
        else:
            combination = draw(_first_or_any(_group_combinations(candidate, group, None)))
        chosen = _merged(spec, chosen, combination)
    assume(candidate.supports_all(chosen))
    return chosen


def draw_value(option: Option, supported: Any) -> SearchStrategy[Any]:
    """Draws one of the supported values of an option."""
    if supported is not ANY:
        return one_of(supported)
    return one_of(option.choices) if option.interval is None else _number(option)


def one_of(values: tuple[Any, ...]) -> SearchStrategy[Any]:
    """Draws one of several values. Hypothesis shrinks to the first value."""
    return _typed_choice(values, tuple(map(type, values)))


_Combination = tuple[tuple[str, Any], ...]


def _group_combinations(
    candidate: Candidate, group: tuple[str, ...], forced: ForcedOption | None
) -> tuple[_Combination, ...]:
    """Returns the valid combinations of a group's options, the plainest first.

    Raises:
        UsageError: if there are none.
    """
    values = tuple(
        forced.values if forced is not None and name == forced.option else _finite(candidate, name) for name in group
    )
    combinations = _combinations(candidate.spec, group, values)
    if combinations:
        return combinations
    plainest = {name: choices[0] for name, choices in zip(group, values, strict=True)}
    why = candidate.spec.conflict(plainest)
    if forced is not None and _group_combinations(candidate, group, None):
        raise UsageError(
            f"candidate {candidate.name!r}: supports names {forced}, which is not valid with any other supported "
            f"choice: {why}. Drop it from supports, or support a choice that it needs"
        )
    raise UsageError(
        f"candidate {candidate.name!r}: supports={dict(candidate.supports)!r} leaves no valid combination of "
        f"{', '.join(group)}: {why}. Change supports so that one combination is valid"
    )


def _merged(spec: Spec, chosen: dict[str, Any], more: _Combination) -> dict[str, Any]:
    """Adds options to the chosen ones, unless this makes them invalid. Defaults are left out."""
    both = chosen | {name: value for name, value in more if value != spec.supported_options[name].default}
    return chosen if spec.conflict(both) else both


def _finite(candidate: Candidate, name: str) -> tuple[Any, ...]:
    """Returns the supported values of an option, the default first."""
    option, supported = candidate.spec.supported_options[name], candidate.supported(name)
    values = option.choices if supported is ANY else supported
    if option.default not in values:
        return values
    return (option.default, *(value for value in values if value != option.default))


@cache
def _combinations(spec: Spec, group: tuple[str, ...], values: tuple[tuple[Any, ...], ...]) -> tuple[_Combination, ...]:
    every = (tuple(zip(group, combination, strict=True)) for combination in product(*values))
    return tuple(combination for combination in every if not spec.conflict(dict(combination)))


@cache
def _typed_choice(values: tuple[Any, ...], types: tuple[type, ...]) -> SearchStrategy[Any]:
    """Draws one of several values. ``types`` tells (False,) from (0.0,), which are equal as keys of
    a cache.
    """
    return st.sampled_from(values)


@cache
def _first_or_any(values: tuple[Any, ...]) -> SearchStrategy[Any]:
    """Draws the first value in half of the draws, and else any. There may be many combinations, but
    few are usual.
    """
    return st.just(values[0]) | st.sampled_from(values)


@cache
def _number(option: Option) -> SearchStrategy[float]:
    """Draws the default in half of the draws, and else any of the option's numbers."""
    return st.just(option.default) | st.sampled_from(option.drawn)
