# SPDX-License-Identifier: Apache-2.0
"""Looks for two mistakes that together explain what a kernel returned, if no single mistake does.

All pairs of the bank would be too many. So the first mistake of a pair must explain something by
itself: some outputs on every problem, or all outputs on a problem on which the second mistake does
not show. Such problems are made from failing ones: an option is left out, or all tokens are
trained. A pair is one counterfactual with the stages of both mistakes.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from typing import Any

from lossgate.base.errors import CandidateError, UsageError
from lossgate.cases.case import Case
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.seams import RIGHT, Outputs, Seams, run
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.diagnosis.explanation import Explanation, explanation
from lossgate.diagnosis.inquiry import Inquiry
from lossgate.diagnosis.observed import Observed, scope_of
from lossgate.diagnosis.where import words_of_several
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.outputs import Output
from lossgate.worlds.base import RankFailure

_FIRST = 4
"""The largest number of mistakes that are tried as the first of a pair. Their effects differ."""
_PAIRS = 3
"""The largest number of pairs that are looked for."""
_ALWAYS = ("mask ignored, padding too", "mask ignored")
"""Mistakes that are always tried as the first of a pair. As the second one they would show on every
made problem, because each has a token that is not trained."""
_MADE_PLAINER = 4
"""The largest number of problems that are made from the smallest one."""
_IN_TURN = ("leaves", "values", "outputs", "upstream")
"""The stages that change and return their last argument. So two mistakes can be made in turn."""


@dataclass(frozen=True)
class _First:
    """A mistake that may be the first of a pair."""

    mistake: Counterfactual
    alone: frozenset[Output]
    """The outputs that the mistake explains by itself on every problem."""


def two_mistakes(inquiry: Inquiry) -> list[Explanation]:
    """Returns pairs of mistakes that explain all that was returned on all problems."""
    return [explanation(pair, inquiry.failing) for pair in _pairs(inquiry.seen, inquiry.known)]


def _pairs(seen: Sequence[Observed], bank: Sequence[Counterfactual]) -> list[Counterfactual]:
    failing = [one for one in seen if one.wrong]
    wrong = scope_of(failing)
    by_outputs = _by_outputs(seen, bank, wrong)
    if any(first.alone == wrong for first in by_outputs):
        return []  # single mistakes explain all, and the problems do not tell which is right
    if found := [pair for pair in islice(_apart(by_outputs, wrong), _PAIRS) if _explains_all(pair, seen)]:
        return found
    most = max((len(first.alone) for first in by_outputs), default=0)
    firsts = [first for first in by_outputs if len(first.alone) == most] or list(_by_problems(failing, bank))
    pairs = chain.from_iterable(_with_another(first, failing, wrong, bank) for first in _unlike(firsts, failing))
    return list(islice((pair for pair in pairs if _explains_all(pair, seen)), _PAIRS))


def _explains_all(pair: Counterfactual, seen: Sequence[Observed]) -> bool:
    """Returns whether a pair explains all outputs of all problems, and can be made on every failing
    one.
    """
    failing = sorted((observed for observed in seen if observed.wrong), key=lambda observed: observed.setting.tokens)
    if not all(observed.explained_by(pair) and observed.fits(pair, observed.got) for observed in failing):
        return False
    return all(observed.explained_by(pair) for observed in seen if not observed.wrong)


def _by_outputs(seen: Sequence[Observed], bank: Iterable[Counterfactual], wrong: frozenset[Output]) -> list[_First]:
    """Returns the mistakes that explain some wrong outputs on all problems. The first ones may be
    made in any output alone.

    If values are wrong, a mistake must explain one of them, which is quickly seen. The gradients
    alone may be wrong by the other mistake.
    """
    found: list[_First] = []
    values = frozenset(output for output in wrong if output.kind != "gradient")
    most_wrong_first = sorted(seen, key=lambda observed: (-len(observed.wrong), observed.setting.tokens))
    for mistake in bank:
        explained = wrong
        for observed in most_wrong_first:
            explained = _explained(observed, mistake, explained, values)
            if not explained:
                break
        if explained:
            found.append(_First(mistake, explained))
    return sorted(found, key=lambda first: not first.mistake.of_any_output)


def _explained(
    observed: Observed, mistake: Counterfactual, outputs: frozenset[Output], values: frozenset[Output]
) -> frozenset[Output]:
    """Returns the outputs that a mistake explains on a problem. If values are wrong, these are none
    unless one of them is a value.
    """
    own = frozenset(output for output in outputs & values if observed.only([output]).explained_by(mistake))
    if values and not own:
        return own
    return own | {output for output in outputs - values if observed.only([output]).explained_by(mistake)}


def _apart(firsts: Sequence[_First], wrong: frozenset[Output]) -> Iterator[Counterfactual]:
    """Yields the pairs in which each mistake is made in its own outputs, and both explain all."""
    for number, one in enumerate(firsts):
        for other in firsts[number + 1 :]:
            if one.alone | other.alone == wrong:
                others = other.alone - one.alone
                pair = each_in_its_own(one.mistake, one.alone, other.mistake, others)
                yield _with_words(pair, _in(one.alone, one.mistake), _in(others, other.mistake))


def _by_problems(failing: Sequence[Observed], bank: Iterable[Counterfactual]) -> Iterator[_First]:
    """Yields the mistakes that explain all outputs of one problem.

    It is the smallest problem, or else the first problem made from it that a mistake explains. A
    made problem on which only numbers such as the loss are wrong is left out, as a number fits too
    easily.
    """
    smallest = min(failing, key=lambda observed: observed.setting.tokens)
    made = [one for one in islice(_plainer(smallest), _MADE_PLAINER) if any(output.dims for output in one.wrong)]
    for one in (smallest, *made):
        if found := [mistake for mistake in bank if one.explained_by(mistake)]:
            yield from (_First(mistake, frozenset()) for mistake in found)
            break
    yield from (_First(mistake, frozenset()) for mistake in bank if mistake.name in _ALWAYS)


def _plainer(observed: Observed) -> Iterator[Observed]:
    """Runs plainer problems: one with all tokens trained, and for each option one without it."""
    case, problem = observed.case, observed.case.problem
    plainer = [replace(problem, masks=("all",) * len(problem.masks))]
    for name in problem.options:
        others = {option: value for option, value in problem.options.items() if option != name}
        plainer.append(replace(problem, options=others))
    for each in plainer:
        try:
            yield Observed(Case(case.candidate, each, case.world))
        except (CandidateError, RankFailure, UsageError):  # the problem or the candidate does not allow it
            continue


def _unlike(firsts: Sequence[_First], failing: Sequence[Observed]) -> list[_First]:
    """Returns the plainest mistake of each effect, as many as are tried."""
    found: list[_First] = []
    for first in firsts:
        if len(found) < _FIRST and not any(_alike(first.mistake, other.mistake, failing) for other in found):
            found.append(first)
    return found


def _alike(one: Counterfactual, other: Counterfactual, failing: Sequence[Observed]) -> bool:
    return all(observed.alike(one, other) for observed in failing)


def _with_another(
    first: _First, failing: Sequence[Observed], wrong: frozenset[Output], bank: Sequence[Counterfactual]
) -> Iterator[Counterfactual]:
    """Yields pairs of a mistake and another that changes the outputs that it leaves to explain.

    If the first mistake explains some outputs by itself, the other is made in the rest alone.
    """
    words, left = first.mistake.words(words_of_several(wrong)), wrong - first.alone
    smallest = min(failing, key=lambda one: one.setting.tokens)
    others = sorted(bank, key=lambda other: not other.of_any_output) if first.alone else bank
    for other in others:
        if not smallest.says_something(other) or not smallest.changes(other) & left:
            continue
        if (pair := both(first.mistake, other)) is None:
            continue
        if first.alone:
            limited = each_in_its_own(first.mistake, first.alone, pair, left)
            yield _with_words(replace(limited, name=pair.name, made_of=pair.made_of), words, _in(left, other))
        else:
            yield _with_words(pair, words, other.words(words_of_several(wrong)))


def _with_words(pair: Counterfactual, one: str, other: str) -> Counterfactual:
    todo = "; and ".join(each.todo for each in pair.made_of if each.todo)
    return replace(pair, sentence=f"there are two mistakes. One: {one}. The other: {other}", todo=todo)


def _in(outputs: Collection[Output], mistake: Counterfactual) -> str:
    """Returns the words for a mistake that is made in some outputs alone."""
    words = words_of_several(outputs)
    named = mistake.of_any_output or words in mistake.sentence
    return mistake.words(words) if named else f"{mistake.words(words)}, in {words} alone"


def both(one: Counterfactual, other: Counterfactual) -> Counterfactual | None:
    """Returns a counterfactual that makes two mistakes. The sentence is left empty.

    None if both replace a stage that can't be replaced twice, or if one is not made of stages.
    """
    if one.computed is not None or other.computed is not None or one.name == other.name:
        return None
    seams: dict[str, Any] = {}
    for field in fields(Seams):
        right = getattr(RIGHT, field.name)
        own = [x for x in (one, other) if getattr(x.seams, field.name) is not right]
        if not own:
            continue
        if len(own) == 1:
            # The stage of the loss gets no setting, so it can't ask whether the mistake applies.
            stage = own[0].seams.loss if field.name == "loss" else _where_it_applies(own[0], field.name)
        else:
            stage = _put_together(one, other, field.name)
        if stage is None:
            return None
        seams[field.name] = stage
    together = Seams(**seams)
    return Counterfactual(
        name=f"{one.name}; {other.name}",
        sentence="",
        kind="two mistakes",
        seams=replace(together, fields=_without_labels(together.fields)) if together.opens_token_stage else together,
        applies=lambda setting: one.applies(setting) or other.applies(setting),
        padding=one.padding or other.padding,
        made_of=(one, other),
    )


def each_in_its_own(
    one: Counterfactual, outputs: Collection[Output], other: Counterfactual, others: Collection[Output]
) -> Counterfactual:
    """Returns a counterfactual that makes two mistakes, each in some outputs alone.

    Other outputs are right. The sentence is left empty.
    """

    def computed(setting: Setting) -> Outputs | None:
        found, of_other = one.run(setting), other.run(setting)
        if found is None and of_other is None:
            return None
        picked = {o: x for o, x in (found or {}).items() if o in outputs}
        return {**run(setting), **picked, **{o: x for o, x in (of_other or {}).items() if o in others}}

    return Counterfactual(
        name=f"{one.name}; {other.name}",
        sentence="",
        kind="two mistakes",
        computed=computed,
        made_of=(one, other),
    )


def _where_it_applies(one: Counterfactual, name: str) -> Callable[..., Any]:
    """Returns the stage of a mistake. It is right on problems to which the mistake can't apply."""
    wrong, right = getattr(one.seams, name), getattr(RIGHT, name)

    def stage(setting: Setting, *given: Any) -> Any:
        return (wrong if one.applies(setting) else right)(setting, *given)

    return stage


def _put_together(one: Counterfactual, other: Counterfactual, name: str) -> Callable[..., Any] | None:
    """Returns a stage with the mistakes of both; None if they can't be combined in this stage."""
    first, then = _where_it_applies(one, name), _where_it_applies(other, name)
    if name in _IN_TURN:
        return lambda setting, *given: then(setting, *given[:-1], first(setting, *given))
    if name == "fields":
        return lambda setting: _fields_of_both(first(setting), then(setting))
    if name == "options":
        return lambda setting: then(_with_options(setting, first(setting)))
    return None


def _fields_of_both(one: Fields, other: Fields) -> Fields:
    """Returns the fields that two mistakes change.

    Raises:
        ValueError: if both change one field.
    """
    if one.keys() & other.keys():
        raise ValueError("two mistakes change one field")
    return {**one, **other}


def _without_labels(find: Callable[[Setting], Fields]) -> Callable[[Setting], Fields]:
    """Returns a stage of fields that refuses to change labels. The stages of tokens would not see
    such a change.
    """

    def found(setting: Setting) -> Fields:
        given = find(setting)
        if "labels" in given:
            raise ValueError("one of two mistakes changes labels, and the other opens a stage of tokens")
        return given

    return found


def _with_options(setting: Setting, bound: BoundSpec) -> Setting:
    changed = copy(setting)
    changed.__dict__["bound_spec"] = bound  # what it has found and keeps
    return changed
