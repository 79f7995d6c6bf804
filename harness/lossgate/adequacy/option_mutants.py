# SPDX-License-Identifier: Apache-2.0
"""Option mutants: kernels that take one choice of an option for another.

Such a kernel is right wherever the two choices give the same result. So the problems tried are
enough only if they kill each mutant: on one of them the judge rejects what the other choice gives
in place of the kernel's own.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

from lossgate.base.spelling import in_a_row
from lossgate.cases.option_strategies import ForcedOption
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.option import Option

NEAREST = 1e-3
"""Numbers that are nearer to each other need not be distinguished: an epsilon of 1e-8."""

Kind = tuple[Any, ...]
"""Values of an option that a kernel is likely to treat alike."""

Side = Literal["value", "gradient"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class OptionMutant:
    """A kernel that computes what ``other`` gives wherever its option has one of ``values``."""

    option: str
    values: Kind
    other: Any
    side: Side
    """Where a problem must show it: in a differentiated value (the loss), or in a gradient."""

    def __str__(self) -> str:
        return (
            f"{self.choice} computed as {self.other}, seen in {'its value' if self.side == 'value' else 'a gradient'}"
        )

    @property
    def choice(self) -> str:
        """The choice that is mistaken, as people write it."""
        return str(self.target)

    @property
    def target(self) -> ForcedOption:
        """The choice that a problem must have for the mutant to show."""
        return ForcedOption(self.option, self.values)

    def put_choice(self, bound: BoundSpec, candidate: Candidate, chance: Random) -> BoundSpec | None:
        """Returns a problem's options with the choice that the mutant mistakes.

        Returns None if the nearest valid options that have it are not supported.
        """
        if self.mistakes(bound):
            return bound
        values = bound.spec.with_choice(bound.values, self.option, chance.choice(self.values))
        return bound.spec.bind(values) if values is not None and candidate.supports_all(values) else None

    def mutate(self, bound: BoundSpec) -> dict[str, Any] | None:
        """Returns the options that the mutant computes with in place of a problem's own.

        Returns None where the problem's choice is none of ``values``, or no valid options have the
        other choice.
        """
        return bound.spec.with_choice(bound.values, self.option, self.other) if self.mistakes(bound) else None

    def mistakes(self, bound: BoundSpec) -> bool:
        """Returns whether the problem's choice is one of ``values``."""
        default = bound.spec.supported_options[self.option].default
        return _within(bound.values.get(self.option, default), self.values)


def option_mutants(candidate: Candidate) -> Mapping[str, OptionMutant]:
    """Returns, by name, a mutant for each supported choice taken for each other known one.

    Options of what comes before the log-probabilities have none for a candidate that is given no
    logits.
    """
    return _by_name(candidate, _of_option)


def near_mutants(candidate: Candidate) -> Mapping[str, OptionMutant]:
    """Returns, by name, mutants that need not be killed: each takes a supported number for another
    one, or for the default, that is near it.
    """
    return _by_name(candidate, _near_of_option)


def _by_name(
    candidate: Candidate, of_option: Callable[[Option, Any], Iterator[OptionMutant]]
) -> Mapping[str, OptionMutant]:
    spec = candidate.spec
    options = (o for o in spec.options if candidate.starts_at.has_logits or o.name not in spec.logit_options)
    found = (mutant for option in options for mutant in of_option(option, candidate.supported(option.name)))
    return {str(mutant): mutant for mutant in found}


def _of_option(option: Option, supported: Any) -> Iterator[OptionMutant]:
    own = option.drawn if supported is ANY else supported
    known = _kinds((*own, *option.drawn), option.default)
    for values in known:
        mine = tuple(value for value in own if _within(value, values))
        for others in known if mine else ():
            if others is not values and not _near(mine, others):
                yield from (OptionMutant(option.name, mine, others[0], side) for side in SIDES)


def _near_of_option(option: Option, supported: Any) -> Iterator[OptionMutant]:
    # Numbers of an interval are supported together: the farthest tells whether any is far.
    known = option.choices or (option.default, max(option.drawn, key=lambda value: abs(value - option.default)))
    own = known if supported is ANY else supported
    for value in dict.fromkeys(own):
        for other in dict.fromkeys((*own, option.default)):
            if value != other and _near((value,), (other,)):
                yield from (OptionMutant(option.name, (value,), other, side) for side in SIDES)


def _kinds(values: tuple[Any, ...], default: Any) -> list[Kind]:
    """Sorts values into kinds.

    The default, 0 (which often switches something off) and each choice that is no number are kinds
    of their own; all other numbers are one kind.
    """
    distinct = tuple(dict.fromkeys(values))
    alone = [v for v in distinct if not isinstance(v, float) or v in (default, 0.0)]
    others = (v for v in distinct if not _within(v, tuple(alone)))
    numbers = tuple(v for v in others if not (isinstance(default, float) and abs(v - default) < NEAREST))
    return [(v,) for v in alone] + ([numbers] if numbers else [])


def _within(value: Any, values: Kind) -> bool:
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def _near(values: Kind, others: Kind) -> bool:
    if not all(isinstance(v, float) for v in (*values, *others)):
        return False
    return all(abs(v - o) < NEAREST for v in values for o in others)


def not_distinguished(
    candidate: Candidate, mutants: Iterable[OptionMutant], unseen: Collection[str]
) -> tuple[str, ...]:
    """Returns the choices that no problem distinguished, such as "epsilon 0.0 and 1e-08".

    A kernel that takes one of them for the other would have passed. Options that the candidate does
    not name in ``supports`` are left out: it does not say that it computes them.

    Args:
        candidate: what was verified.
        mutants: those whose two choices were compared.
        unseen: the names of those that no problem showed and that need not be killed.
    """
    of_option: dict[str, dict[tuple[str, str], bool]] = {}
    for mutant in mutants:
        if mutant.option in candidate.supports:
            pairs = of_option.setdefault(mutant.option, {})
            one, other = str(mutant.values[0]), str(mutant.other)
            pair = (other, one) if (other, one) in pairs else (one, other)
            pairs[pair] = pairs.get(pair, True) and str(mutant) in unseen
    alike = {option: [pair for pair, same in pairs.items() if same] for option, pairs in of_option.items()}
    return tuple(f"{option} {in_a_row(group)}" for option, pairs in alike.items() for group in _groups(pairs))


def _groups(pairs: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Returns groups of choices in which each two are a pair, so that each pair is in one."""
    groups: list[list[str]] = []
    for one, other in pairs:
        for group in groups:
            if one in group and all(other == x or (x, other) in pairs or (other, x) in pairs for x in group):
                group.extend(() if other in group else (other,))
                break
        else:
            groups.append([one, other])
    return groups
