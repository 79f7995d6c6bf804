# SPDX-License-Identifier: Apache-2.0
"""Looks for two mistakes that explain together what a kernel returned, where none does alone.

All pairs of the bank would be too many. So the first must explain something by itself: some of the
outputs on every problem, or all outputs on a problem where the second does not show. Such problems
are made: the failing ones with an option left out, or with all tokens trained. Two that both apply
are one counterfactual with the stages of both.
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
"""The most mistakes that are tried as the first of a pair, each with another effect."""
_PAIRS = 3
"""The most pairs that are looked for."""
_ALWAYS = ("mask ignored, padding too", "mask ignored")
"""Mistakes that are tried in any case: no problem can be made without a token that is not
trained."""
_MADE_PLAINER = 4
"""The most problems that are made of the smallest one."""
_IN_TURN = ("leaves", "values", "outputs", "upstream")
"""The stages that pass on what they are given last, so that one mistake comes after the other."""


@dataclass(frozen=True)
class _First:
    """A mistake that may be the first of a pair."""

    mistake: Counterfactual
    alone: frozenset[Output]
    """The outputs that it explains by itself on every problem."""


def two_mistakes(inquiry: Inquiry) -> list[Explanation]:
    """Returns pairs of mistakes that explain all that was returned on all problems."""
    return [explanation(pair, inquiry.failing) for pair in _pairs(inquiry.seen, inquiry.known)]


def _pairs(seen: Sequence[Observed], bank: Sequence[Counterfactual]) -> list[Counterfactual]:
    failing = [one for one in seen if one.wrong]
    wrong = scope_of(failing)
    by_outputs = _by_outputs(seen, bank, wrong)
    if any(first.alone == wrong for first in by_outputs):
        return []  # each of several explains all alone, and the problems do not tell which
    if found := [pair for pair in islice(_apart(by_outputs, wrong), _PAIRS) if _explains_all(pair, seen)]:
        return found
    most = max((len(first.alone) for first in by_outputs), default=0)
    firsts = [first for first in by_outputs if len(first.alone) == most] or list(_by_problems(failing, bank))
    pairs = chain.from_iterable(_with_another(first, failing, wrong, bank) for first in _unlike(firsts, failing))
    return list(islice((pair for pair in pairs if _explains_all(pair, seen)), _PAIRS))


def _explains_all(pair: Counterfactual, seen: Sequence[Observed]) -> bool:
    """Returns whether a pair gives all that was returned, and says something of every failing
    problem.
    """
    failing = sorted((one for one in seen if one.wrong), key=lambda one: one.setting.tokens)
    others = [one for one in seen if not one.wrong]
    return all(one.explained_by(pair) and one.fits(pair, one.got) for one in failing) and all(
        one.explained_by(pair) for one in others
    )


def _by_outputs(seen: Sequence[Observed], bank: Iterable[Counterfactual], wrong: frozenset[Output]) -> list[_First]:
    """Returns the mistakes that explain some of the wrong outputs on all problems: those first that
    may be in any output alone.

    If values are wrong, they must explain some of these, which takes far less time to see. What is
    wrong in gradients alone may be the other mistake.
    """
    found: list[_First] = []
    values = frozenset(output for output in wrong if output.kind != "gradient")
    most_wrong_first = sorted(seen, key=lambda one: (-len(one.wrong), one.setting.tokens))
    for mistake in bank:
        left = wrong
        for one in most_wrong_first:
            right = frozenset(output for output in left & values if one.only([output]).explained_by(mistake))
            if values and not right:
                left = right
                break
            left = right | {output for output in left - values if one.only([output]).explained_by(mistake)}
        if left:
            found.append(_First(mistake, left))
    return sorted(found, key=lambda first: not first.mistake.of_any_output)


def _apart(firsts: Sequence[_First], wrong: frozenset[Output]) -> Iterator[Counterfactual]:
    """Yields the pairs of which each explains its outputs, and together all."""
    for number, one in enumerate(firsts):
        for other in firsts[number + 1 :]:
            if one.alone | other.alone == wrong:
                others = other.alone - one.alone
                pair = each_in_its_own(one.mistake, one.alone, other.mistake, others)
                yield _with_words(pair, _in(one.alone, one.mistake), _in(others, other.mistake))


def _by_problems(failing: Sequence[Observed], bank: Iterable[Counterfactual]) -> Iterator[_First]:
    """Yields the mistakes that explain all outputs of the smallest problem, or of the first of
    those that are made of it of which any mistake does. A number alone says too little.
    """
    smallest = min(failing, key=lambda one: one.setting.tokens)
    problems = [one for one in islice(_plainer(smallest), _MADE_PLAINER) if any(output.dims for output in one.wrong)]
    for one in (smallest, *problems):
        if found := [mistake for mistake in bank if one.explained_by(mistake)]:
            yield from (_First(mistake, frozenset()) for mistake in found)
            break
    yield from (_First(mistake, frozenset()) for mistake in bank if mistake.name in _ALWAYS)


def _plainer(observed: Observed) -> Iterator[Observed]:
    """Yields what the kernel returns on a problem with all tokens trained, and with an option at
    its default.
    """
    case, problem = observed.case, observed.case.problem
    given = dict(problem.options)
    changed = [replace(problem, masks=("all",) * len(problem.masks))]
    changed += [replace(problem, options={o: x for o, x in given.items() if o != left_out}) for left_out in given]
    for each in changed:
        try:
            yield Observed(Case(case.candidate, each, case.world))
        except (CandidateError, RankFailure, UsageError):  # it does not take this problem
            continue


def _unlike(firsts: Sequence[_First], failing: Sequence[Observed]) -> list[_First]:
    """Returns the plainest of each effect, as many as are tried."""
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
    """Yields a mistake with each other that changes what it leaves to explain: made everywhere, or
    in those outputs alone.
    """
    words, left = first.mistake.words(words_of_several(wrong)), wrong - first.alone
    smallest = min(failing, key=lambda one: one.setting.tokens)
    for other in sorted(bank, key=lambda one: not one.of_any_output) if first.alone else bank:
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
    """Returns what a mistake does in some outputs alone."""
    words = words_of_several(outputs)
    named = mistake.of_any_output or words in mistake.sentence
    return mistake.words(words) if named else f"{mistake.words(words)}, in {words} alone"


def both(one: Counterfactual, other: Counterfactual) -> Counterfactual | None:
    """Returns two mistakes of a kernel as one; None if both replace the same stage, or one of them
    is not made of stages. Its sentence is to be written by who knows the outputs.
    """
    if one.computed is not None or other.computed is not None or one.name == other.name:
        return None
    seams: dict[str, Any] = {}
    for field in fields(Seams):
        right = getattr(RIGHT, field.name)
        own = [x for x in (one, other) if getattr(x.seams, field.name) is not right]
        if field.name == "loss" and own:  # it is not given the setting, so that it can't be asked whether it applies
            if len(own) > 1:
                return None
            seams[field.name] = own[0].seams.loss
        elif len(own) == 1:
            seams[field.name] = _where_it_applies(own[0], field.name)
        elif own and (put := _put_together(one, other, field.name)) is not None:
            seams[field.name] = put
        elif own:
            return None
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
    """Returns two mistakes, each made in some outputs alone. All others are right. Its sentence is
    to be written by who knows their words.
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
    """Returns a stage that is wrong only where its mistake says something."""
    wrong, right = getattr(one.seams, name), getattr(RIGHT, name)

    def stage(setting: Setting, *given: Any) -> Any:
        return (wrong if one.applies(setting) else right)(setting, *given)

    return stage


def _put_together(one: Counterfactual, other: Counterfactual, name: str) -> Callable[..., Any] | None:
    """Returns a stage that both get wrong; None if that can't be said."""
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
    """Returns what refuses to change labels: the stages of tokens are not opened for others."""

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
