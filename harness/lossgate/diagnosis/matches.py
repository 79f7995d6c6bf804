# SPDX-License-Identifier: Apache-2.0
"""The mistakes that explain all that a kernel returned, and which of them have one effect."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.diagnosis.observed import Observed
from lossgate.specs.outputs import Output


@dataclass(frozen=True)
class Match:
    """A counterfactual that explains every wrong output of every problem seen."""

    counterfactual: Counterfactual
    whole: bool
    """It explains the outputs that are right, too."""
    always: bool
    """It explains the problems that are right, too."""
    spoilt: int
    """The outputs that are right and that it would have spoilt."""

    @property
    def explains_all(self) -> bool:
        return self.whole and self.always

    @property
    def level(self) -> tuple[bool, bool, int]:
        """Sorts what explains the most first."""
        return not self.always, not self.whole, self.spoilt


def matching(seen: Sequence[Observed], bank: Iterable[Counterfactual]) -> list[Match]:
    """Returns the mistakes that explain every wrong output of every problem, the best first.

    Args:
        seen: what the kernel returned, on problems where it is wrong and on others.
        bank: the mistakes.
    """
    failing = sorted((one for one in seen if one.wrong), key=plainness)
    scope = scope_of(failing)
    found: list[Match] = []
    for one in bank:
        if not all(explains(one, observed) for observed in failing):
            continue
        whole = all(observed.fits(one, observed.got) for observed in failing)
        always = all(observed.fits(one, scope) for observed in seen if not observed.wrong)
        changed = frozenset[Output]().union(*(observed.changes(one) for observed in failing))
        spoilt = 0 if whole or one.of_any_output else len(changed - scope)
        if not whole and all(output.kind == "metric" for output in scope) and not one.of_any_output:
            continue  # a number says little: a metric alone is explained by what leaves the rest right
        found.append(Match(one, whole, always, spoilt))
    return sorted(found, key=lambda match: match.level)


def explains(one: Counterfactual, observed: Observed) -> bool:
    """Returns whether a problem fails, and a mistake explains all that is wrong."""
    return bool(observed.wrong) and observed.explained_by(one)


def best_of(found: Sequence[Match]) -> list[Match]:
    """Returns the matches that explain as much as the first."""
    return [match for match in found if match.level == found[0].level]


def plain_of(effect: Sequence[Match]) -> list[Match]:
    """Returns matches of one effect without operations of the reference, if others are there."""
    others = [match for match in effect if match.counterfactual.kind != "operation"]
    return others or list(effect[:1])


def scope_of(failing: Iterable[Observed]) -> frozenset[Output]:
    """Returns the outputs that are wrong on some problem."""
    return frozenset[Output]().union(*(one.wrong for one in failing))


def by_effect(failing: Sequence[Observed], best: Iterable[Match]) -> list[list[Match]]:
    """Returns matches by effect, each group with the plainest first."""
    groups: list[list[Match]] = []
    scope = scope_of(failing)
    for match in best:
        for group in groups:
            plainest = group[0].counterfactual
            if all(observed.alike(plainest, match.counterfactual, scope) for observed in failing):
                group.append(match)
                break
        else:
            groups.append([match])
    return groups


def says_too_much(failing: Sequence[Observed], one: Counterfactual) -> bool:
    """Returns whether a mistake that is made of several has the effect of one of them alone."""
    return any(all(observed.alike(one, each, observed.got) for observed in failing) for each in one.made_of)


def plainness(observed: Observed) -> tuple[int, int]:
    """Sorts problems with few options first, as a mistake may not be made with some: then small
    ones.
    """
    return len(observed.setting.bound_spec.values), observed.setting.tokens
