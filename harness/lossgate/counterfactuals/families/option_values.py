# SPDX-License-Identifier: Apache-2.0
"""Options: one choice taken for another, two options swapped, a number changed."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from typing import Any

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import Seams
from lossgate.counterfactuals.setting import Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.option import Option
from lossgate.specs.spec import Spec


def options(spec: Spec, head: str) -> Iterator[Counterfactual]:
    """Yields the mistakes of each option."""
    logits = head in ("hidden", "logits")
    own = [option for option in spec.options if logits or option.name not in spec.logit_options]
    for option in own:
        for other in dict.fromkeys([*option.choices, option.default]):
            default = "its default" if other == option.default else f"where the default is {option.default}"
            plain = mistake(
                f"{option.name} as {other}",
                f"the kernel computes as if {option.name} were {other}, {default}",
                partial(_is_other, option, other),
                f"compute {option.name} as it is given, or leave it out of supports=",
                options=partial(_chosen, option, other),
            )
            yield plain
            if _may_be_forbidden(spec, option, other):
                yield replace(
                    plain,
                    name=f"{plain.name}, all else kept",
                    sentence=f"{plain.sentence}, though other options forbid it",
                    seams=Seams(options=partial(_chosen_alone, option.name, other)),
                    applies=partial(_is_forbidden, option, other),
                    made_of=(plain,),  # where no other option counts it says too much
                )
        if _is_weight(option) and option.name not in spec.logit_options:
            for what in _CHANGES:
                yield mistake(
                    f"{option.name} {what}",
                    f"{option.name} is {what}",
                    partial(_gives_another, option, what),
                    options=partial(_forced, option.name, what),
                )
    for one, other in combinations([o for o in own if _is_weight(o) and o.name not in spec.logit_options], 2):
        yield mistake(
            f"{one.name} and {other.name} swapped",
            f"{one.name} and {other.name} are swapped",
            partial(_differ, one, other),
            options=partial(_swapped, one.name, other.name),
        )


def options_for_others(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes of an option that takes the number of another one."""
    spec = setting.spec
    numbers = [option for option in spec.options if _is_weight(option) and option.name not in spec.logit_options]
    for one, other in permutations(numbers, 2):
        yield mistake(
            f"{other.name} for {one.name}",
            f"{other.name} stands in place of {one.name}",
            partial(_differ, one, other),
            options=partial(_other_for, one.name, other.name),
        )


def _other_for(one: str, other: str, setting: Setting) -> BoundSpec:
    return with_values(setting, {one: _value(setting.bound_spec, other)})


def _is_weight(option: Option) -> bool:
    return isinstance(option.default, float) or any(isinstance(value, float) for value in option.drawn)


_CHANGES: dict[str, Any] = {
    "so large that it bounds nothing": lambda x: 1e30,
    "negated": lambda x: -x,
    "doubled": lambda x: 2 * x,
    "halved": lambda x: x / 2,
    "squared": lambda x: x * x,
    "inverted": lambda x: 1 / x,
    "taken from 1": lambda x: 1 - x,
}


def _value(bound: BoundSpec, option: str) -> Any:
    return getattr(bound.options, option)


def _is_other(option: Option, other: Any, setting: Setting) -> bool:
    own = _value(setting.bound_spec, option.name)
    return repr(own) != repr(other) and _chosen_or_none(option, other, setting) is not None


def _chosen_or_none(option: Option, other: Any, setting: Setting) -> BoundSpec | None:
    bound = setting.bound_spec
    values = bound.spec.with_choice(bound.values, option.name, other)
    return None if values is None else bound.spec.bind(values)  # some metrics are there for some choices alone


def _may_be_forbidden(spec: Spec, option: Option, other: Any) -> bool:
    """Returns whether a choice of another option does not allow this one."""
    group = next((names for names in spec.option_groups if option.name in names), ())
    others = [spec.supported_options[name] for name in group if name != option.name]
    return any(spec.conflict({option.name: other, one.name: choice}) for one in others for choice in one.choices)


def _is_forbidden(option: Option, other: Any, setting: Setting) -> bool:
    """Returns whether other options do not allow a choice."""
    bound = setting.bound_spec
    is_own = repr(_value(bound, option.name)) == repr(other)
    return not is_own and bool(bound.spec.conflict({**bound.values, option.name: other}))


def _chosen(option: Option, other: Any, setting: Setting) -> BoundSpec:
    found = _chosen_or_none(option, other, setting)
    assert found is not None
    return found


def _chosen_alone(option: str, other: Any, setting: Setting) -> BoundSpec:
    return with_values(setting, {option: other})


def _number(setting: Setting, option: str) -> float | None:
    value = _value(setting.bound_spec, option)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _gives_another(option: Option, change: str, setting: Setting) -> bool:
    """Returns whether a change gives an option another number. 0 is left out: it has no inverse."""
    value = _number(setting, option.name)
    if value is None or value == 0:
        return False
    return _CHANGES[change](value) != value


def _differ(one: Option, other: Option, setting: Setting) -> bool:
    numbers = _number(setting, one.name), _number(setting, other.name)
    return None not in numbers and numbers[0] != numbers[1]


def _forced(option: str, what: str, setting: Setting) -> BoundSpec:
    return with_values(setting, {option: _CHANGES[what](_number(setting, option))})


def _swapped(one: str, other: str, setting: Setting) -> BoundSpec:
    bound = setting.bound_spec
    return with_values(setting, {one: _value(bound, other), other: _value(bound, one)})


def with_values(setting: Setting, given: dict[str, Any]) -> BoundSpec:
    """Returns a problem's spec with other values of options, valid or not: a wrong kernel does not
    ask.
    """
    bound = setting.bound_spec
    changed = copy.copy(bound.options)
    for name, value in given.items():
        object.__setattr__(changed, name, value)
    return BoundSpec(spec=bound.spec, values=bound.values, options=changed)
