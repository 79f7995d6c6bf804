# SPDX-License-Identifier: Apache-2.0
"""Contrasts: the choices of an option that must be seen to differ before a verdict counts.

A kernel that ignores an option, or takes one choice of it for another, is right wherever the two give the same result.
So a problem speaks for a choice only if the judge would have rejected the result of another choice in its place.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from lossgate.declaration.candidate import ANY, Candidate
from lossgate.losses import find_spec
from lossgate.problems.problem import Problem
from lossgate.specs.spec import Option, Spec

NEAREST = 1e-3
"""Numbers that are nearer to one another make no difference that must be seen: an epsilon of 1e-8."""

Kind = tuple[Any, ...]
"""Values of an option that a kernel is likely to treat alike."""

Side = Literal["value", "gradient"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class Contrast:
    """On a problem whose option ``option`` is one of ``values``, the judge rejects what ``other`` would have given."""

    option: str
    values: Kind
    other: Any
    side: Side
    """Where it does: in a value that is differentiated (the loss), or in a gradient."""

    def __str__(self) -> str:
        return f"{self.choice} told from {self.other} by {'its value' if self.side == 'value' else 'a gradient'}"

    @property
    def choice(self) -> str:
        """As people write it."""
        return f"{self.option}={'/'.join(map(str, self.values))}"

    def swapped(self, problem: Problem) -> Problem | None:
        """The other choice in place of the problem's own; None where that is none of ``values``, or nothing goes with the other."""
        spec = find_spec(problem.spec)
        if not _within(problem.options.get(self.option, spec.features[self.option].default), self.values):
            return None
        options = spec.with_choice(problem.options, self.option, self.other)
        return None if options is None else replace(problem, options=options)


def contrasts(spec: Spec, candidate: Candidate) -> Mapping[str, Contrast]:
    """Each choice that ``candidate`` supports, against every other one that the spec knows."""
    return {
        str(contrast): contrast
        for option in spec.options
        for contrast in _of_option(option, spec.supported(candidate, option.name))
    }


def _of_option(option: Option, supported: Any) -> Iterator[Contrast]:
    own = option.drawn if supported is ANY else supported
    known = _kinds((*own, *option.drawn), option.default)
    for values in known:
        mine = tuple(value for value in own if _within(value, values))
        for others in known if mine else ():
            if others is not values and not _near(mine, others):
                yield from (Contrast(option.name, mine, others[0], side) for side in SIDES)


def _kinds(values: tuple[Any, ...], default: Any) -> list[Kind]:
    """The default, 0 (which often switches something off) and each choice that is no number are kinds of their own; all other numbers are one."""
    distinct = tuple(dict.fromkeys(values))
    alone = [v for v in distinct if not isinstance(v, float) or v in (default, 0.0)]
    numbers = tuple(
        v
        for v in distinct
        if not _within(v, tuple(alone)) and not (isinstance(default, float) and abs(v - default) < NEAREST)
    )
    return [(v,) for v in alone] + ([numbers] if numbers else [])


def _within(value: Any, values: Kind) -> bool:
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def _near(values: Kind, others: Kind) -> bool:
    return all(isinstance(v, float) for v in (*values, *others)) and all(
        abs(v - o) < NEAREST for v in values for o in others
    )
