# SPDX-License-Identifier: Apache-2.0
"""Explanations of what a kernel returned, and the rule by which some of them are told."""

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
"""The largest number of causes that are told. More than three would help little."""
_ONE_OF_MANY = (OPERATION, "two mistakes")
"""The kinds of mistakes of which many may have the same effect, without a plainest one."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A hypothesis that explains what a kernel returned, or a part of it."""

    cause: Cause
    failing: Sequence[Observed]
    """The failing problems that are explained."""
    mistake: Counterfactual | None = None
    """The counterfactual; None for rounding, which has no single result."""
    left: tuple[float, ...] = ()
    """What stays unexplained, in numbers. The first number weighs most. The explanations with the
    least are the best."""
    effect: Sequence[Mapping[Output, Tensor]] = ()
    """The outputs that it predicts on each of these problems."""
    unexplained: int = 0
    """The number of failing problems that are not explained."""
    scope: str = ""
    """See ``Diagnosis``, also for the next two."""
    condition: str = ""
    partly: bool = False
    stands_for_others: bool = False
    """Whether others with the same effect are not told. There may be many, and none is plainer."""

    def like(self, other: "Explanation") -> bool:
        """Returns whether another explanation predicts the same on the same problems."""
        if [*self.failing] != [*other.failing]:
            return False
        for own, of_other in zip(self.effect, other.effect, strict=True):
            for output in own.keys() & of_other.keys():
                one, another = own[output], of_other[output]
                if one.shape != another.shape or not same(one, another):
                    return False
        return True


def explanation(mistake: Counterfactual, failing: Sequence[Observed], **more: Any) -> Explanation:
    """Returns the explanation of some failing problems by a mistake.

    Args:
        mistake: the mistake.
        failing: the problems.
        more: further fields of the explanation.
    """
    wrong = scope_of(failing)
    effect = [{o: x for o, x in observed.predicted(mistake).items() if o in wrong} for observed in failing]
    cause = Cause(name=mistake.name, words=mistake.words(words_of_several(wrong)), todo=mistake.todo)
    more = {"stands_for_others": mistake.kind in _ONE_OF_MANY, **more}
    return Explanation(cause=cause, failing=failing, mistake=mistake, effect=effect, **more)


def by_effect(explanations: Iterable[Explanation]) -> list[list[Explanation]]:
    """Returns groups of explanations that predict the same, in the order of the explanations."""
    groups: list[list[Explanation]] = []
    for one in explanations:
        group = next((group for group in groups if group[0].like(one)), None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    return groups


def best_of(explanations: Iterable[Explanation]) -> list[Explanation]:
    """Returns the explanations that leave the least unexplained."""
    found = list(explanations)
    least = min((one.left for one in found), default=())
    return [one for one in found if one.left == least]


def said(explanations: Iterable[Explanation], asked: int) -> Diagnosis | None:
    """Returns the diagnosis that tells the best explanations; None if they are too many.

    The best may have three different effects at most, and only one if they explain a part alone.

    Args:
        explanations: the explanations, the plainest first.
        asked: the number of mistakes that were compared.
    """
    best = best_of(explanations)
    if not best:
        return None
    effects = by_effect(best)
    if len(effects) > (1 if best[0].partly else NAMES):
        return None
    causes: list[Cause] = []
    for effect in effects:
        told = _plain(effect)[: NAMES + 1 - len(effects)]  # each effect must have a place
        causes += (replace(one.cause, same_as_before=number > 0) for number, one in enumerate(told))
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
    """Returns the explanations of an effect that are told. One that stands for others is told only
    if there is no plainer one.
    """
    plain = [one for one in effect if not one.stands_for_others]
    return plain or list(effect[:1])
