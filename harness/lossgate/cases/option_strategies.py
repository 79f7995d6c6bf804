# SPDX-License-Identifier: Apache-2.0
"""How Hypothesis draws the options of a problem: those that a candidate supports and that are valid
together.
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
    if target is not None:  # its own group first, because later ones give way
        groups.sort(key=lambda group: target.option not in group)
    chosen: dict[str, Any] = {}
    for group in groups:
        forced = target if target is not None and target.option in group else None
        if len(group) == 1 and forced is None:
            (name,) = group
            drawn = draw(draw_value(options[name], candidate.supported(name)))
            chosen = _merged(spec, chosen, ((name, drawn),))
            continue
        combinations = _group_combinations(candidate, group, forced)
        chosen = _merged(spec, chosen, draw(one_of(combinations) if forced else _first_or_any(combinations)))
    assume(candidate.supports_all(chosen))
    return chosen


def draw_value(option: Option, supported: Any) -> SearchStrategy[Any]:
    """Draws one of the supported values of an option."""
    if supported is not ANY:
        return one_of(supported)
    return one_of(option.choices) if option.interval is None else _number(option)


def one_of(values: tuple[Any, ...]) -> SearchStrategy[Any]:
    """Draws one of some values; Hypothesis shrinks to the first."""
    return _typed_choice(values, tuple(map(type, values)))


_Combination = tuple[tuple[str, Any], ...]


def _group_combinations(
    candidate: Candidate, group: tuple[str, ...], forced: ForcedOption | None
) -> tuple[_Combination, ...]:
    """Returns the valid combinations of a group's options, the plainest first."""
    values = tuple(
        forced.values if forced is not None and name == forced.option else _finite(candidate, name) for name in group
    )
    combinations = _combinations(candidate.spec, group, values)
    if not combinations:
        first = dict(zip(group, (value[0] for value in values), strict=True))
        why = candidate.spec.conflict(first)
        if forced is not None and _group_combinations(candidate, group, None):
            raise UsageError(
                f"candidate {candidate.name!r}: supports names {forced}, which is not valid with any other supported "
                f"choice: {why}. Drop it from supports, or support a choice that it needs"
            )
        raise UsageError(
            f"candidate {candidate.name!r}: supports={dict(candidate.supports)!r} leaves no valid combination of "
            f"{', '.join(group)}: {why}. Change supports so that one combination is valid"
        )
    return combinations


def _merged(spec: Spec, chosen: dict[str, Any], more: _Combination) -> dict[str, Any]:
    """Adds more options to those chosen before, unless they are not valid together."""
    both = chosen | {name: value for name, value in more if value != spec.supported_options[name].default}
    return chosen if spec.conflict(both) else both


def _finite(candidate: Candidate, name: str) -> tuple[Any, ...]:
    """Returns the supported values of an option, the default first."""
    option, supported = candidate.spec.supported_options[name], candidate.supported(name)
    values = option.choices if supported is ANY else supported
    default = option.default
    return (default, *(value for value in values if value != default)) if default in values else values


@cache
def _combinations(spec: Spec, group: tuple[str, ...], values: tuple[tuple[Any, ...], ...]) -> tuple[_Combination, ...]:
    every = (tuple(zip(group, combination, strict=True)) for combination in product(*values))
    return tuple(combination for combination in every if not spec.conflict(dict(combination)))


@cache
def _typed_choice(values: tuple[Any, ...], types: tuple[type, ...]) -> SearchStrategy[Any]:
    """``types`` distinguish (False,) from (0.0,), which are the same key to a cache."""
    return st.sampled_from(values)


@cache
def _first_or_any(values: tuple[Any, ...]) -> SearchStrategy[Any]:
    """Draws the first as often as all others together, because few of many are usual."""
    return st.just(values[0]) | st.sampled_from(values)


@cache
def _number(option: Option) -> SearchStrategy[float]:
    """Draws the default as often as all other numbers together."""
    return st.just(option.default) | st.sampled_from(option.drawn)
