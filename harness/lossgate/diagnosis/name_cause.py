# SPDX-License-Identifier: Apache-2.0
"""Looks for the mistake that explains what a kernel returned.

A name is said only after it has held on several fresh problems that fail, of ordinary size, on
layouts whose sizes differ where the kernel can be split. On one problem, and on small ones above
all, a wrong name fits now and then.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lossgate.base.errors import CandidateError
from lossgate.cases.case import Case
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.families.operations import operations
from lossgate.counterfactuals.families.rounded import rounded
from lossgate.counterfactuals.families.terms import terms
from lossgate.diagnosis.cause import Cause, Diagnosis
from lossgate.diagnosis.coarser_precision import as_coarse_as_usual
from lossgate.diagnosis.fitted import fitted_factors
from lossgate.diagnosis.matches import (
    Match,
    best_of,
    by_effect,
    explains,
    matching,
    plain_of,
    plainness,
    says_too_much,
    scope_of,
)
from lossgate.diagnosis.mixed import mixed_in
from lossgate.diagnosis.multiples import whole_number
from lossgate.diagnosis.observed import Observed
from lossgate.diagnosis.partly import partly
from lossgate.diagnosis.rounding import coarser
from lossgate.diagnosis.search import FIRST, FRESH, Search
from lossgate.diagnosis.two_mistakes import two_mistakes
from lossgate.diagnosis.where import where, words_of_several
from lossgate.specs.outputs import Output
from lossgate.worlds.base import RankFailure

_MORE = 4
"""How often further problems are asked where several names are left that differ."""
_TELLING = 3
"""Problems without a mistake that must lack what is said to be its condition."""
_NAMES = 3
"""The most names that are said: more than three say little."""


def name_cause(
    cases: Iterable[Case], bank: Iterable[Counterfactual], without: Collection[str] = (), smallest: Case | None = None
) -> Diagnosis | None:
    """Returns what explains a disagreement; None if too few problems fail to tell.

    Args:
        cases: of one candidate, of ordinary size, on several layouts in turn. As many are run as
            are needed.
        bank: the counterfactuals, the plainest first. What the first failing problem shows is
            added to them: the terms of its loss, and factors. If none of these explains all, there
            are also what may be rounded and the single operations of its loss; and if none of these
            fits either, other losses that may be mixed in.
        without: names that are not to be said: a measurement asks what is said without the right
            one.
        smallest: the case of the problem that is shown. Where few others fail, it is asked whether
            the kernel rounds more than it declares.
    """
    search, known = Search(iter(cases)), list(bank)
    if not search.observe(FIRST):
        return _rounded_on_few(search, smallest)
    first = search.failing[0]
    known += [*terms(first.setting), *fitted_factors(first)]
    known = [one for one in known if one.name not in without]
    found = matching(search.seen, known)
    if not any(one.explains_all for one in found):
        others = [*rounded(first.setting), *operations(first.setting)]
        others = [one for one in others if one.name not in without]
        known, found = known + others, sorted(found + matching(search.seen, others), key=lambda match: match.level)
    if not found:
        mixtures = [one for one in mixed_in(first) if one.name not in without]
        known, found = known + mixtures, matching(search.seen, mixtures)
    if not search.observe(FIRST + FRESH):
        if not found and (diagnosis := _rounded_on_few(search, smallest)) is not None:
            return diagnosis
        return Diagnosis(problems=len(search.failing), tried=len(search.seen), where=where(search.failing))
    found = matching(search.seen, [one.counterfactual for one in found])
    for more in range(1, _MORE + 1):
        if len(by_effect(search.failing, best_of(found))) > 1 and search.observe(FIRST + FRESH + 2 * more):
            found = matching(search.seen, [one.counterfactual for one in found])
    return _diagnosis(search, found, known)


def _diagnosis(
    search: Search, found: Sequence[Match], known: Sequence[Counterfactual], *, beside: bool = False
) -> Diagnosis:
    """Returns the names that explain all.

    Args:
        search: the cases.
        found: the mistakes that do, the best first.
        known: all that were asked.
        beside: nothing else is looked for if these are too many.
    """
    failing = search.failing
    common = Diagnosis(problems=len(failing), layouts=_layouts(failing), asked=len(known))
    best = [match for match in best_of(found) if not says_too_much(failing, match.counterfactual)]
    effects = by_effect(failing, best)
    if not 0 < len(effects) <= _NAMES:  # so many different mistakes explain it that none is sure
        return common if beside else _without_name(search, known, common)
    scope = scope_of(failing)
    whole, always = best[0].whole, best[0].always
    condition = "" if always else _condition(search.seen, best[0].counterfactual, scope)
    said = words_of_several(scope)
    in_scope = "" if whole or best[0].counterfactual.of_any_output else f", in {said} alone"
    return replace(common, causes=tuple(_causes(effects, said)), scope=in_scope, condition=condition)


def _causes(effects: Sequence[Sequence[Match]], said: str) -> list[Cause]:
    """Returns what is said of mistakes: the plainest of each effect, and others of it as far as
    there is room.

    Args:
        effects: the mistakes, by effect.
        said: the outputs that are wrong, in words.
    """
    causes = [
        Cause(
            name=match.counterfactual.name,
            words=match.counterfactual.words(said),
            todo=match.counterfactual.todo,
            same_as_before=number > 0,
        )
        for effect in effects
        for number, match in enumerate(plain_of(effect)[: _NAMES + 1 - len(effects)])
    ]
    return causes[:_NAMES]


def _without_name(search: Search, known: Sequence[Counterfactual], common: Diagnosis) -> Diagnosis:
    """Returns what is said if no mistake explains all that is wrong: that it may be rounding, a
    mistake that explains most rows of an output, or where these are.
    """
    failing = search.failing
    if (rounded := coarser(failing)) is not None:
        return replace(common, causes=(rounded,))
    if (number := whole_number(failing, words_of_several(scope_of(failing)))) is not None:
        return replace(common, causes=(number,))
    if (of_two := _of_two(search, known, common)) is not None:
        return of_two
    if (of_most := _of_most(search, known, common)) is not None:
        return of_most
    common = _beside_rounding(search, known, common)
    if common.causes:
        return common
    failing = search.failing  # there may be more, now
    common = replace(common, problems=len(failing), layouts=_layouts(failing))
    found = partly(failing, known)
    likely = [one for one in found if one.level == found[0].level and one.output == found[0].output]
    if likely and all(likely[0].like(one) for one in likely):  # or none is sure
        return replace(common, causes=(likely[0].cause,), partly=True, where=())
    condition = _condition_alone(search.seen)
    return replace(common, where=(*common.where, *condition, *where(failing)))


def _rounded_on_few(search: Search, smallest: Case | None) -> Diagnosis | None:
    """Returns that a kernel rounds more than it declares, if that explains the problem that is
    shown and the few others that fail.
    """
    if smallest is None:
        return None
    try:
        shown = Observed(smallest)
    except (RankFailure, CandidateError):  # it failed otherwise this time
        return None
    if not shown.wrong or (cause := coarser([shown, *search.failing])) is None:
        return None
    return Diagnosis(causes=(cause,), problems=len(search.failing), tried=len(search.seen))


def _of_two(search: Search, known: Sequence[Counterfactual], common: Diagnosis) -> Diagnosis | None:
    """Returns two mistakes that explain all together. Several pairs may do so, with one effect."""
    pairs = two_mistakes(search.seen, known)
    effects = by_effect(search.failing, [Match(one, whole=True, always=True, spoilt=0) for one in pairs])
    if not 0 < len(effects) <= _NAMES:
        return None
    plainest = [effect[:1] for effect in effects]
    return replace(common, causes=tuple(_causes(plainest, words_of_several(scope_of(search.failing)))))


def _beside_rounding(search: Search, known: Sequence[Counterfactual], common: Diagnosis) -> Diagnosis:
    """Returns the mistake of a kernel that also rounds more than it declares; if none explains all,
    the diagnosis without a name says on how many problems rounding would.
    """
    first = search.failing[0].case
    change = as_coarse_as_usual(first.candidate, first.problem.dtype)
    if change is None or not search.observe(2 * (FIRST + FRESH)):
        return common
    candidate = change.of(first.candidate, first.problem.dtype)
    judged = replace(search, seen=[one.as_if_declared(candidate) for one in search.seen])
    failing, total = len(judged.failing), len(search.failing)
    if failing >= FRESH and (found := matching(judged.seen, known)):
        beside = _diagnosis(judged, found, known, beside=True)
        if beside.causes:
            more = f". Beside that, it rounds more to {change.to} than its declared precision says"
            return replace(beside, condition=f"{beside.condition}{more}")
    if not 0 < failing < total:
        return common
    hint = f"{total - failing} of {total} failing problems would agree if the kernel declared to round {change.rounds}"
    return replace(common, where=(f"{hint} to {change.to}: declare what is meant, and verify again",))


def _of_most(search: Search, known: Iterable[Counterfactual], common: Diagnosis) -> Diagnosis | None:
    """Returns the mistake that explains all failing problems but those that have something in
    common: there it is made along with another, or in another way.
    """
    plainest = min(search.failing[:FIRST], key=plainness)
    likely = [one for one in known if explains(one, plainest)]
    if not likely or not search.observe(2 * (FIRST + FRESH)):
        return None
    failing = search.failing
    of_each = {one.name: [o for o in failing if explains(one, o)] for one in likely}
    explained = max(of_each.values(), key=len)
    best = [one for one in likely if len(of_each[one.name]) == len(explained)]
    others = [o for o in failing if o not in explained]
    if len(explained) < FRESH or len(others) < _TELLING or any(of_each[one.name] != explained for one in best):
        return None
    in_others = frozenset.intersection(*(one.traits for one in others)).difference(*(one.traits for one in explained))
    effects = by_effect(explained, [Match(one, whole=True, always=False, spoilt=0) for one in best])
    whole = all(o.fits(one, o.got) for o in explained for one in best)
    if not in_others or not whole or len(effects) > 1:
        return None
    return replace(
        common,
        causes=tuple(_causes(effects, words_of_several(scope_of(explained)))),
        condition=f", except with {min(in_others, key=lambda trait: (len(trait), trait))}",
        problems=len(explained),
        failing=len(failing),
        layouts=_layouts(explained),
        partly=True,
    )


def _layouts(seen: Iterable[Observed]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(one.case.problem.layout) for one in seen))


def _condition(seen: Sequence[Observed], one: Counterfactual, scope: Collection[Output]) -> str:
    """Returns in words what all failing problems have, and none on which the kernel does not make
    the mistake.
    """
    failing = [observed.traits for observed in seen if observed.wrong]
    others = [observed.traits for observed in seen if not observed.wrong and not observed.fits(one, scope)]
    common = frozenset.intersection(*failing).difference(*others)
    own = [trait for trait in common if trait.partition("=")[0] in one.name]
    if own or (common and len(others) >= _TELLING):
        return f", with {min(own or common, key=lambda trait: (len(trait), trait))}"
    return ", on some problems, and nothing known tells them from the others"


def _condition_alone(seen: Sequence[Observed]) -> tuple[str, ...]:
    """Returns in words what all failing problems have and none of the others."""
    failing = [observed.traits for observed in seen if observed.wrong]
    others = [observed.traits for observed in seen if not observed.wrong]
    common = frozenset.intersection(*failing).difference(*others)
    if len(others) < _TELLING or not common:
        return ()
    trait = min(common, key=lambda trait: (len(trait), trait))
    return (f"only problems with {trait} disagree, {len(failing)} of {len(seen)}",)
