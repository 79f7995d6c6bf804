# SPDX-License-Identifier: Apache-2.0
"""Explanations by one mistake. It explains all that a kernel returned, all except on some problems,
or all except rounding.
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
"""How many times further problems are run if mistakes with different effects are left."""
_TELLING = 3
"""The least number of problems without the mistake that must lack the trait that is named as its
condition."""


def explaining(seen: Sequence[Observed], mistakes: Iterable[Counterfactual]) -> list[Explanation]:
    """Returns the mistakes that explain every wrong output of every problem, the best first.

    Args:
        seen: what the kernel returned, on problems where it is wrong and on others.
        mistakes: the mistakes, the plainest first.
    """
    failing = [observed for observed in seen if observed.wrong]
    plainest_first, scope = sorted(failing, key=plainness), scope_of(failing)
    is_metric_alone = all(output.kind == "metric" for output in scope)
    found: list[Explanation] = []
    for one in mistakes:
        if not all(_explains(one, observed) for observed in plainest_first):
            continue
        wrong_elsewhere = any(not observed.fits(one, scope) for observed in seen if not observed.wrong)
        fits_all_outputs = all(observed.fits(one, observed.got) for observed in failing)
        changed_too_much, in_words = 0, ""
        if not fits_all_outputs and not one.of_any_output:
            if is_metric_alone:
                continue  # one number per problem fits too easily, so the rest must be explained as well
            changed = frozenset[Output]().union(*(observed.changes(one) for observed in failing))
            changed_too_much, in_words = len(changed - scope), f", in {words_of_several(scope)} alone"
        unexplained = wrong_elsewhere, not fits_all_outputs, changed_too_much
        found.append(explanation(one, failing, left=unexplained, scope=in_words))
    return sorted(found, key=lambda each: each.left)


def one_mistake(inquiry: Inquiry) -> list[Explanation]:
    """Returns the mistakes that explain all that is wrong. While several have different effects,
    further problems are run.
    """
    found = explaining(inquiry.seen, inquiry.likely)
    for more in range(1, _MORE + 1):
        if len(by_effect(best_of(found))) > 1 and inquiry.observe(FIRST + FRESH + 2 * more):
            left = {one.cause.name for one in found}
            found = explaining(inquiry.seen, [one for one in inquiry.likely if one.name in left])
    return _sure(inquiry.seen, found)


def on_most_problems(inquiry: Inquiry) -> list[Explanation]:
    """Returns the mistakes that explain most failing problems, if the other problems share a trait.

    With that trait, the kernel makes another mistake as well, or makes this one differently.
    """
    plainest = min(inquiry.failing[:FIRST], key=plainness)
    likely = [one for one in inquiry.known if _explains(one, plainest)]
    if not likely or not inquiry.observe(2 * (FIRST + FRESH)):
        return []
    best = best_of(_of_most(one, inquiry.failing) for one in likely)
    explained = best[0].failing
    unexplained, is_not_whole = best[0].left
    if len(explained) < FRESH or unexplained < _TELLING or is_not_whole:
        return []
    others = [observed for observed in inquiry.failing if observed not in explained]
    common = _in_all_of(others, but_none_of=explained)
    if not common:
        return []
    return [replace(one, condition=f", except with {_plainest(common)}") for one in best]


def beside_rounding(inquiry: Inquiry) -> list[Explanation]:
    """Returns the mistakes of a kernel that also rounds more than it declares."""
    if inquiry.as_if_coarser is None:
        return []
    change, seen = inquiry.as_if_coarser
    if sum(bool(one.wrong) for one in seen) < FRESH:
        return []
    more = f". In addition, it rounds more to {change.to} than its declared precision says"
    found = _sure(seen, explaining(seen, inquiry.known))
    return [replace(one, condition=f"{one.condition}{more}") for one in found]


def _explains(one: Counterfactual, observed: Observed) -> bool:
    """Returns whether a problem fails and a mistake explains its wrong outputs."""
    return bool(observed.wrong) and observed.explained_by(one)


def _sure(seen: Sequence[Observed], found: Sequence[Explanation]) -> list[Explanation]:
    """Returns the best explanations, with the condition under which the first one holds.

    A mistake that is made of several is left out if it has the same effect as one of them, because
    it would say too much.
    """
    failing = [observed for observed in seen if observed.wrong]

    def says_too_much(mistake: Counterfactual) -> bool:
        return any(all(observed.alike(mistake, part) for observed in failing) for part in mistake.made_of)

    best = [each for each in best_of(found) if each.mistake is None or not says_too_much(each.mistake)]
    if best and best[0].mistake is not None and best[0].left[0]:  # it does not fit all problems that agree
        best[0] = replace(best[0], condition=_condition(seen, best[0].mistake))
    return best


def _of_most(one: Counterfactual, failing: Sequence[Observed]) -> Explanation:
    explained = [observed for observed in failing if _explains(one, observed)]
    left = len(failing) - len(explained)
    is_not_whole = not all(observed.fits(one, observed.got) for observed in explained)
    return explanation(one, explained, left=(left, is_not_whole), unexplained=left, partly=True)


def _condition(seen: Sequence[Observed], one: Counterfactual) -> str:
    """Returns words for the problems on which the kernel makes a mistake.

    They name the plainest trait that all failing problems have, and that no problem has on which
    the kernel could make the mistake and does not.
    """
    failing = [observed for observed in seen if observed.wrong]
    scope = scope_of(failing)
    spared = [observed for observed in seen if not observed.wrong and not observed.fits(one, scope)]
    common = _in_all_of(failing, but_none_of=spared)
    of_own_option = [trait for trait in common if trait.partition("=")[0] in one.name]
    if of_own_option or (common and len(spared) >= _TELLING):
        return f", with {_plainest(of_own_option or common)}"
    return ", on some problems, and no known trait tells them from the others"


def condition_alone(seen: Sequence[Observed]) -> tuple[str, ...]:
    """Returns words for the plainest trait that all failing problems have and no other problem has.
    Nothing if there is none.
    """
    failing, others = [one for one in seen if one.wrong], [one for one in seen if not one.wrong]
    common = _in_all_of(failing, but_none_of=others)
    if len(others) < _TELLING or not common:
        return ()
    return (f"only problems with {_plainest(common)} disagree, {len(failing)} of {len(seen)}",)


def _in_all_of(these: Iterable[Observed], *, but_none_of: Iterable[Observed]) -> frozenset[str]:
    shared = frozenset.intersection(*(observed.traits for observed in these))
    return shared.difference(*(observed.traits for observed in but_none_of))


def _plainest(traits: Iterable[str]) -> str:
    return min(traits, key=lambda trait: (len(trait), trait))
