# SPDX-License-Identifier: Apache-2.0
"""One mistake that explains all that a kernel returned; all but on some problems; or all but what
rounding explains.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.diagnosis.explanation import Explanation, best_of, by_effect, explanation
from lossgate.diagnosis.inquiry import FIRST, FRESH, Inquiry
from lossgate.diagnosis.observed import Observed, plainness, scope_of
from lossgate.diagnosis.where import words_of_several
from lossgate.specs.outputs import Output

_MORE = 4
"""How often further problems are asked where several names are left that differ."""
_TELLING = 3
"""Problems without a mistake that must lack what is said to be its condition."""


def explaining(seen: Sequence[Observed], mistakes: Iterable[Counterfactual]) -> list[Explanation]:
    """Returns the mistakes that explain every wrong output of every problem, the best first.

    Args:
        seen: what the kernel returned, on problems where it is wrong and on others.
        mistakes: the plainest first.
    """
    failing = [one for one in seen if one.wrong]
    plainest_first, scope = sorted(failing, key=plainness), scope_of(failing)
    found: list[Explanation] = []
    for one in mistakes:
        if not all(_explains(one, observed) for observed in plainest_first):
            continue
        whole = all(observed.fits(one, observed.got) for observed in failing)
        always = all(observed.fits(one, scope) for observed in seen if not observed.wrong)
        changed = frozenset[Output]().union(*(observed.changes(one) for observed in failing))
        spoilt = 0 if whole or one.of_any_output else len(changed - scope)
        if not whole and all(output.kind == "metric" for output in scope) and not one.of_any_output:
            continue  # a number says little: a metric alone is explained by what leaves the rest right
        alone = "" if whole or one.of_any_output else f", in {words_of_several(scope)} alone"
        found.append(explanation(one, failing, left=(not always, not whole, spoilt), scope=alone))
    return sorted(found, key=lambda one: one.left)


def one_mistake(inquiry: Inquiry) -> list[Explanation]:
    """Returns the mistakes that explain all that is wrong. While several differ, further problems
    are asked.
    """
    found = explaining(inquiry.seen, inquiry.likely)
    for more in range(1, _MORE + 1):
        if len(by_effect(best_of(found))) > 1 and inquiry.observe(FIRST + FRESH + 2 * more):
            left = {one.cause.name for one in found}
            found = explaining(inquiry.seen, [one for one in inquiry.likely if one.name in left])
    return _sure(inquiry.seen, found)


def on_most_problems(inquiry: Inquiry) -> list[Explanation]:
    """Returns the mistakes that explain all failing problems but those that have something in
    common: there they are made along with another, or in another way.
    """
    plainest = min(inquiry.failing[:FIRST], key=plainness)
    likely = [one for one in inquiry.known if _explains(one, plainest)]
    if not likely or not inquiry.observe(2 * (FIRST + FRESH)):
        return []
    best = best_of(_of_most(one, inquiry.failing) for one in likely)
    unexplained, is_not_whole = best[0].left
    if len(best[0].failing) < FRESH or unexplained < _TELLING or is_not_whole:
        return []
    others = [one for one in inquiry.failing if one not in best[0].failing]
    common = _in_all_of(others, but_none_of=best[0].failing)
    return [replace(one, condition=f", except with {_plainest(common)}") for one in best] if common else []


def beside_rounding(inquiry: Inquiry) -> list[Explanation]:
    """Returns the mistakes of a kernel that also rounds more than it declares."""
    if inquiry.as_if_coarser is None:
        return []
    change, seen = inquiry.as_if_coarser
    if sum(bool(one.wrong) for one in seen) < FRESH:
        return []
    more = f". Beside that, it rounds more to {change.to} than its declared precision says"
    found = _sure(seen, explaining(seen, inquiry.known))
    return [replace(one, condition=f"{one.condition}{more}") for one in found]


def _explains(one: Counterfactual, observed: Observed) -> bool:
    """Returns whether a problem fails, and a mistake explains all that is wrong."""
    return bool(observed.wrong) and observed.explained_by(one)


def _sure(seen: Sequence[Observed], found: Sequence[Explanation]) -> list[Explanation]:
    """Returns the best explanations, with the condition under which the first holds. A mistake made
    of several is left out if it has the effect of one of them alone: it says too much.
    """
    failing = [one for one in seen if one.wrong]
    best = [
        one
        for one in best_of(found)
        if one.mistake is None
        or not any(all(o.alike(one.mistake, each) for o in failing) for each in one.mistake.made_of)
    ]
    if best and best[0].mistake is not None and best[0].left[0]:
        best[0] = replace(best[0], condition=_condition(seen, best[0].mistake))
    return best


def _of_most(one: Counterfactual, failing: Sequence[Observed]) -> Explanation:
    explained = [observed for observed in failing if _explains(one, observed)]
    left = len(failing) - len(explained)
    is_not_whole = not all(observed.fits(one, observed.got) for observed in explained)
    return explanation(one, explained, left=(left, is_not_whole), unexplained=left, partly=True)


def _condition(seen: Sequence[Observed], one: Counterfactual) -> str:
    """Returns in words what all failing problems have, and none on which the kernel does not make
    the mistake.
    """
    failing = [observed for observed in seen if observed.wrong]
    scope = scope_of(failing)
    others = [observed for observed in seen if not observed.wrong and not observed.fits(one, scope)]
    common = _in_all_of(failing, but_none_of=others)
    own = [trait for trait in common if trait.partition("=")[0] in one.name]
    if own or (common and len(others) >= _TELLING):
        return f", with {_plainest(own or common)}"
    return ", on some problems, and nothing known tells them from the others"


def condition_alone(seen: Sequence[Observed]) -> tuple[str, ...]:
    """Returns in words what all failing problems have and none of the others."""
    failing, others = [one for one in seen if one.wrong], [one for one in seen if not one.wrong]
    common = _in_all_of(failing, but_none_of=others)
    if len(others) < _TELLING or not common:
        return ()
    return (f"only problems with {_plainest(common)} disagree, {len(failing)} of {len(seen)}",)


def _in_all_of(these: Iterable[Observed], *, but_none_of: Iterable[Observed]) -> frozenset[str]:
    return frozenset.intersection(*(one.traits for one in these)).difference(*(one.traits for one in but_none_of))


def _plainest(traits: Iterable[str]) -> str:
    return min(traits, key=lambda trait: (len(trait), trait))
