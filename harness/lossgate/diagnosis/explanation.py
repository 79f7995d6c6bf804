# SPDX-License-Identifier: Apache-2.0
"""Hypotheses that explain what a kernel returned, and the rule by which one is said."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.operations import OPERATION
from lossgate.counterfactuals.seams import same
from lossgate.diagnosis.cause import Cause, Diagnosis
from lossgate.diagnosis.observed import Observed, layouts_of, scope_of
from lossgate.diagnosis.where import words_of_several
from lossgate.specs.outputs import Output

NAMES = 3
"""The most names that are said: more than three say little."""
_ONE_OF_MANY = (OPERATION, "two mistakes")
"""Kinds of mistakes of which many may have one effect, and none is plainer."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A hypothesis that explains what a kernel returned, or a part of it."""

    cause: Cause
    failing: Sequence[Observed]
    """The failing problems that it explains."""
    mistake: Counterfactual | None = None
    """None if it is no single computation, as with rounding."""
    left: tuple[float, ...] = ()
    """What it leaves unexplained, what weighs most first. Those that leave the least are said."""
    effect: Sequence[Mapping[Output, Tensor]] = ()
    """What it predicts on each of these problems."""
    unexplained: int = 0
    """How many failing problems it does not explain."""
    scope: str = ""
    """As in ``Diagnosis``, and so are the next two."""
    condition: str = ""
    partly: bool = False
    stands_for_others: bool = False
    """Others of its effect are not said: there may be many, and none is plainer."""

    def like(self, other: "Explanation") -> bool:
        """Returns whether another predicts the same on the same problems."""
        if [*self.failing] != [*other.failing]:
            return False
        pairs = ((a[o], b[o]) for a, b in zip(self.effect, other.effect, strict=True) for o in a.keys() & b.keys())
        return all(a.shape == b.shape and same(a, b) for a, b in pairs)


def explanation(one: Counterfactual, failing: Sequence[Observed], **more: Any) -> Explanation:
    """Returns that a mistake explains some failing problems.

    Args:
        one: the mistake.
        failing: the problems.
        more: further fields of the explanation.
    """
    wrong = scope_of(failing)
    effect = [{o: x for o, x in observed.predicted(one).items() if o in wrong} for observed in failing]
    cause = Cause(name=one.name, words=one.words(words_of_several(wrong)), todo=one.todo)
    more = {"stands_for_others": one.kind in _ONE_OF_MANY, **more}
    return Explanation(cause=cause, failing=failing, mistake=one, effect=effect, **more)


def by_effect(explanations: Iterable[Explanation]) -> list[list[Explanation]]:
    """Returns explanations by what they predict, in their order."""
    groups: list[list[Explanation]] = []
    for one in explanations:
        group = next((group for group in groups if group[0].like(one)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def best_of(explanations: Iterable[Explanation]) -> list[Explanation]:
    """Returns the explanations that leave the least."""
    found = list(explanations)
    least = min((one.left for one in found), default=())
    return [one for one in found if one.left == least]


def said(explanations: Iterable[Explanation], asked: int) -> Diagnosis | None:
    """Returns what is said of some explanations; None if they are unsure.

    The best are said if they have at most three effects. If they explain a part alone, they must
    have one.

    Args:
        explanations: the plainest first.
        asked: how many mistakes were compared.
    """
    best = best_of(explanations)
    effects = by_effect(best)
    if not 0 < len(effects) <= (1 if best[0].partly else NAMES):
        return None
    causes = [
        replace(one.cause, same_as_before=number > 0)
        for effect in effects
        for number, one in enumerate(_plain(effect)[: NAMES + 1 - len(effects)])
    ]
    first = best[0]
    return Diagnosis(
        causes=tuple(causes[:NAMES]),
        scope=first.scope,
        condition=first.condition,
        partly=first.partly,
        problems=len(first.failing),
        failing=len(first.failing) + first.unexplained if first.unexplained else 0,
        layouts=layouts_of(first.failing),
        asked=asked,
    )


def _plain(effect: Sequence[Explanation]) -> list[Explanation]:
    """Returns explanations of one effect without those that stand for others, if more are there."""
    others = [one for one in effect if not one.stands_for_others]
    return others or list(effect[:1])
