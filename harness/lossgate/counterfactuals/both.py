# SPDX-License-Identifier: Apache-2.0
"""Two mistakes that a kernel makes at once."""

from collections.abc import Callable, Collection
from copy import copy
from dataclasses import fields, replace
from typing import Any

from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.seams import RIGHT, Outputs, Seams, run
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.outputs import Output

_IN_TURN = ("leaves", "values", "outputs", "upstream")
"""The stages that pass on what they are given last, so that one mistake comes after the other."""


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
        seams=RIGHT,
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
