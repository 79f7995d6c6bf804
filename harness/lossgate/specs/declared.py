# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of ``lossgate.spec``, and makes the fields of a ``Spec`` from them."""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, get_args

from lossgate.base.argument import Argument, Arguments, arguments
from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES
from lossgate.base.names import DTYPES, nearest_dtype
from lossgate.specs.coverage_goals import BIAS_GOALS, TOKEN_GOALS, CoverageGoal
from lossgate.specs.heads import HEADS
from lossgate.specs.logit_filter import FILTER_GOALS, FilterOptions
from lossgate.specs.option import COMMON_OPTIONS, OF_SIZES, Option, options_of
from lossgate.specs.outputs import RETURNED, Metric, Reduction
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Field, fields_of
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS
from lossgate.specs.token_values import USES

_LARGEST_GROUP = 64
"""The most sequences of a group. Problems hold whole groups, and stay small."""

_OF_REFERENCES = ("values", "batch", "options")
_GOALS_OF_EVERY_LOSS = {**TOKEN_GOALS, **BIAS_GOALS, **FILTER_GOALS, **SHARDING_GOALS, **IDS_GOALS}


def check_name(name: Any) -> None:
    if callable(name):
        raise UsageError("spec(...) decorates a reference without a name; write @lossgate.spec('focal') above it")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name):
        raise UsageError(f"spec({name!r}): expected a name of letters, digits, '_', '-' and '.', such as 'focal_nll'")


def declared(given: Arguments) -> dict[str, Any]:
    """Returns the fields of a ``Spec``, by name, without the decorated function.

    Raises:
        UsageError: if the declaration contradicts itself.
    """
    uses = given["uses"].names(USES, "unknown value per token", needed=True)
    heads = _heads(given, uses)
    batch = _batch(given["batch"], heads)
    _check_gathered_ids(given["gathered_ids"], batch)
    options = _options(given)
    scenarios = _scenarios(given, options)
    made: dict[str, Any] = {
        **{name: argument.value for name, argument in given.items() if name not in ("choices", "heads", "batch")},
        "batch_type": batch,
        "inputs": {head: _inputs_class(given["name"].value, head, batch) for head in heads},
        "uses": tuple(name for name in USES if name in uses),  # in one order, whatever the author's
        "options_type": given["options"].value,
        "options": options,
        "option_groups": _groups(given["option_groups"], options),
        "temperature": _divisor(_temperature(given), options, may_be_none=False),
        "softcap": _divisor(given["softcap"], options, may_be_none=True),
        "outputs": _outputs(given, uses, heads),
        "metrics": _metrics(given["metrics"]),
        "scenarios": scenarios,
        "tie_scenarios": _ties(given["tie_scenarios"], scenarios),
        "goals": _goals(given, options, scenarios),
        "also_written": _also_written(given["also_written"]),
        "summary": None if given["summary"].value is None else given["summary"].words(),
        "source": "" if given["source"].value == "" else given["source"].words(),
    }
    if made["temperature"] is not None and made["temperature"] == made["softcap"]:
        raise given["softcap"].error("it is the temperature, too; give each an option of its own")
    _check_functions(given)
    _check_sequences(given)
    for name in ("kinks", "stop_gradient"):
        given[name].truth()
    if "loss" not in made["outputs"]:
        _check_without_loss(given)
    return made


def _heads(given: Arguments, uses: Sequence[str]) -> tuple[str, ...]:
    if given["heads"].value is None:
        of_labels = set(uses) == {"logprobs"} and given["gathered_ids"].value is None
        return ("hidden", "logits", "logprobs") if of_labels else ("hidden", "logits")
    return given["heads"].names(HEADS, "unknown head", needed=True)


def _outputs(given: Arguments, uses: Sequence[str], heads: Sequence[str]) -> tuple[str, ...]:
    """Returns the outputs. Those that have a value for each token need a loss that uses this value,
    and heads that give it.
    """
    argument, ids = given["outputs"], given["gathered_ids"].value
    heads_without = [head for head in heads if not (HEADS[head].has_logits or head == "logprobs")]
    is_used = {"logprobs": "logprobs" in uses and ids is None, "token_entropy": "entropy" in uses}
    if argument.value is None:
        return ("loss", "logprobs") if is_used["logprobs"] and not heads_without else ("loss",)
    outputs = argument.names(RETURNED, "unknown output", needed=True)
    for name in is_used:
        if name not in outputs:
            continue
        if not is_used[name]:
            wanted = "'logprobs' in uses=, and no gathered_ids=" if name == "logprobs" else "'entropy' in uses="
            raise argument.error(f"{name!r} needs {wanted}")
        if heads_without:
            raise argument.error(f"head {heads_without[0]!r} does not give {name!r}; drop one of them")
    return outputs


def _check_without_loss(given: Arguments) -> None:
    of_reference = ("metrics", "extra_metrics", "kinks", "stop_gradient", "also_written")
    if any(given[name].value for name in of_reference):
        raise given["outputs"].error(
            f"without 'loss' nothing calls the reference; drop {'=, '.join(of_reference[:-1])}= and "
            f"{of_reference[-1]}=, or add 'loss'"
        )


# Inputs


def _batch(argument: Argument, heads: Sequence[str]) -> type[Batch]:
    """Returns the batch class, and checks that no input of a head has the name of a field."""
    batch = argument.value
    if not isinstance(batch, type) or not issubclass(batch, Batch):
        raise argument.error("expected a class derived from lossgate.Batch")
    for head in heads:
        for name in fields_of(batch):
            if name in HEADS[head].leaves:
                raise argument.error(
                    f"field {name!r} is also an input of head {head!r}; give it another name, such as 'token_{name}', "
                    f"or leave {head!r} out of heads="
                )
    return batch


def _check_gathered_ids(argument: Argument, batch: type[Batch]) -> None:
    if argument.value is None:
        return
    fields = fields_of(batch)
    own: Field = fields[argument.one_of(fields, "no such field")]
    if own.dtype != "int64" or len(own.dims) != 2 or own.dims[0] != "token":
        raise argument.error(
            f"it is {own.dtype} {own.shape}; expected ids, such as {argument.value}: Tensor = "
            "lossgate.field('token k', ..., dtype='int64', draw=...)"
        )


def _check_sequences(given: Arguments) -> None:
    given["trained_dim"].one_of(("token", "sequence"))
    given["group_size"].count(f"a whole number from 1 to {_LARGEST_GROUP}, such as 2 for pairs", _LARGEST_GROUP)


def _check_functions(given: Arguments) -> None:
    takes = {
        "draw": ("context",),
        "trained": ("batch",),
        "covered": ("batch", "options"),
        "extra_metrics": _OF_REFERENCES,
    }
    for name, own in takes.items():
        if given[name].value is not None:
            given[name].function(*own)


def _also_written(argument: Argument) -> tuple[Any, ...]:
    ways = argument.several("functions")
    for number, way in enumerate(ways):
        Argument(argument.call, f"also_written[{number}]", way).function(*_OF_REFERENCES)
    return ways


def _inputs_class(name: str, head: str, batch_type: type[Batch]) -> type[Batch]:
    """Makes the class of a rank's inputs: the leaves of the head, and the batch."""
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"[_.-]", f"{name}_{head}"))
    doc = f"""What a kernel of spec {name} gets on a rank at head "{head}"."""
    bases: tuple[Any, ...] = (HEADS[head].inputs, batch_type)
    made = type(title, bases, {"__module__": "lossgate.inputs"})
    made.__doc__ = "\n".join((doc, "", *(f"{name}: {field.described}" for name, field in fields_of(made).items())))
    return made


# Options


def _options(given: Arguments) -> tuple[Option, ...]:
    argument = given["options"]
    if not isinstance(argument.value, type) or not is_dataclass(argument.value):
        raise argument.error("expected a class derived from lossgate.Options")
    try:
        options = options_of(argument.value, given["choices"].mapping("{'gamma': (2.0, 0.0)}"))
    except UsageError as error:
        raise argument.error(str(error)) from None
    for option in options:
        if option.name in (*COMMON_OPTIONS, *OF_SIZES):
            what = "a scenario" if option.name in OF_SIZES else "an option"
            raise argument.error(f"every spec has {what} {option.name!r} already; give it another name")
    return options


def _names(options: Iterable[Option]) -> list[str]:
    return [option.name for option in options]


def _groups(argument: Argument, options: Sequence[Option]) -> tuple[tuple[str, ...], ...]:
    """Returns the groups, and checks that no option is listed twice."""
    groups = argument.value
    if not isinstance(groups, tuple) or not all(isinstance(group, tuple) for group in groups):
        raise argument.error("expected a tuple of tuples of options, such as (('top_k', 'top_p'),)")
    names = [name for group in groups for name in group]
    for name in names:
        argument.known(name, _names(options), "unknown option")
        if names.count(name) > 1:
            raise argument.error(f"{name!r} is listed twice; join its groups")
    return groups


def _temperature(given: Arguments) -> Argument:
    """Returns the argument. By default it is the temperature of ``FilterOptions``."""
    argument = given["temperature"]
    if argument.value is None and issubclass(given["options"].value, FilterOptions):
        return Argument(argument.call, argument.name, "temperature")
    return argument


def _divisor(argument: Argument, options: Sequence[Option], *, may_be_none: bool) -> str | None:
    """Returns the name of an option that divides the logits, and checks that it is positive.

    Args:
        argument: the temperature or the soft-cap.
        options: of the spec.
        may_be_none: whether one of the option's values may be None.
    """
    if argument.value is None:
        return None
    name = argument.one_of(_names(options), "no such option")
    option = next(option for option in options if option.name == name)
    for value in option.interval or option.choices:
        positive = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not positive and not (may_be_none and value is None):
            expected = "numbers above 0, or None" if may_be_none else "numbers above 0"
            raise argument.error(f"the option has the value {value!r}; expected {expected}")
    return name


# Metrics and scenarios


def _metrics(argument: Argument) -> dict[str, Metric]:
    """Returns the metrics by name. A metric may be given as text, which is its meaning."""
    found = dict[str, Metric]()
    argument.mapping("{'accuracy': 'what it means'}")
    for name, own in argument.items():
        metric = Metric(meaning=own.value) if isinstance(own.value, str) else own.value
        if not isinstance(metric, Metric):
            raise own.error("expected what it means, or a lossgate.Metric")
        if not isinstance(name, str) or not name.strip() or not metric.meaning.strip():
            raise own.error("expected words as the name of a metric, and as what it means")
        if name in RETURNED or name.startswith("grad of "):
            raise own.error(f"{name!r} is the name of another output; give the metric another name")
        if metric.reduction not in get_args(Reduction):
            raise own.error(
                f"its reduction is {metric.reduction!r}; expected one of {', '.join(get_args(Reduction))}. A mean is a "
                "sum that is already divided by a count of the batch"
            )
        found[name] = metric
    return found


def _scenarios(given: Arguments, options: Sequence[Option]) -> tuple[Option, ...]:
    """Returns the scenarios, and checks that each has its own name, and strings as choices."""
    argument = given["scenarios"]
    if not isinstance(argument.value, tuple) or not all(isinstance(one, Option) for one in argument.value):
        raise argument.error("expected a tuple of lossgate.Option(name=..., ...)")
    taken = {*COMMON_OPTIONS, *OF_SIZES, *_names(options)}
    for scenario in argument.value:
        own = _parts(given, f"scenario {scenario.name!r}: Option(", scenario)
        own["name"].words()
        own["meaning"].words()
        if scenario.name in taken:
            raise own["name"].error("an option or another scenario has this name; rename one")
        taken.add(scenario.name)
        for listed in (own["choices"], own["on_request"]):
            if not isinstance(listed.value, tuple) or not all(isinstance(choice, str) for choice in listed.value):
                raise listed.error("expected a tuple of strings")
        own["default"].one_of(scenario.choices)
    return argument.value


def _ties(argument: Argument, scenarios: Sequence[Option]) -> dict[str, str]:
    choices = {scenario.name: scenario.choices for scenario in scenarios}
    ties = argument.mapping("{'reference': 'equal'}", choices, "unknown scenario")
    for name, choice in argument.items():
        choice.one_of(choices[name])
    return ties


def _parts(given: Arguments, part: str, of: Any) -> dict[str, Argument]:
    """Returns the fields of an object within an argument of a spec.

    Args:
        given: the arguments of the spec.
        part: how messages introduce the object, such as ``goal 'clipped': CoverageGoal(``.
        of: the object.
    """
    call = given["name"].value
    return arguments(f"spec({call!r}): {part}", vars(of))


# Goals


def _goals(given: Arguments, options: Sequence[Option], scenarios: Sequence[Option]) -> dict[str, CoverageGoal]:
    """Returns the goals by name. Checks that each says how it is reached, and names only options,
    scenarios, heads, axes and dtypes that exist.
    """
    argument = given["goals"]
    goals = argument.mapping("{'clipped': lossgate.CoverageGoal(meaning=..., reached=...)}")
    of_scenarios = {f"{scenario.name}: {choice}" for scenario in scenarios for choice in scenario.choices}
    situations = [*_names(options), *COMMON_OPTIONS, *OF_SIZES, *_names(scenarios)]
    for name, own in argument.items():
        if not isinstance(name, str) or not name.strip():
            raise argument.error(f"the name of a goal is {name!r}; expected words")
        if name in of_scenarios:
            raise own.error("a scenario's choice has a goal of this name already; give it another name")
        if name in _GOALS_OF_EVERY_LOSS:
            raise own.error("every loss has a goal of this name already; give it another name")
        goal = own.instance(CoverageGoal, "lossgate.CoverageGoal(meaning=..., reached=...)")
        if goal.reached is None and given["covered"].value is None:
            raise own.error("it does not say how it is reached; give it reached=, or the spec covered=")
        parts = _parts(given, f"goal {name!r}: CoverageGoal(", goal)
        goals[name] = replace(goal, **_of_goal(parts, situations))
    return goals


def _of_goal(goal: Arguments, situations: Sequence[str]) -> dict[str, Any]:
    """Checks the fields of a goal, and returns those that say where it can be reached.

    Args:
        goal: the fields.
        situations: the names of options and scenarios.
    """
    goal["meaning"].words()
    if goal["reached"].value is not None:
        goal["reached"].function(*_OF_REFERENCES)
    unreachable = goal["unreachable_if"].mapping("{'beta': (0.0,)}", situations, "unknown option or scenario")
    for _, values in goal["unreachable_if"].items():
        if isinstance(values.value, str) or not isinstance(values.value, Container):
            raise values.error("expected a tuple of values")
    return {
        "heads": goal["heads"].names(HEADS, "unknown head"),
        "axes": goal["axes"].names(AXES, "unknown mesh axis"),
        "dtypes": goal["dtypes"].names(DTYPES, "unknown dtype", near=nearest_dtype),
        "unreachable_if": unreachable,
    }
