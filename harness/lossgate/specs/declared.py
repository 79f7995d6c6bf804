# SPDX-License-Identifier: Apache-2.0
"""Checks what ``lossgate.spec`` is given, so that a slip is reported where it is made."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, get_args

from lossgate.errors import UsageError
from lossgate.layout import AXES
from lossgate.specs.coverage import TOKEN_GOALS, CoverageGoal
from lossgate.specs.heads import HEADS
from lossgate.specs.inputs import Batch
from lossgate.specs.logit_filter import FILTER_GOALS
from lossgate.specs.metric import Metric, Reduction
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import Option
from lossgate.specs.outputs import RETURNED
from lossgate.specs.record import fields_of, is_plain
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS
from lossgate.spelling import nearest

RESERVED_OPTIONS = ("bias", "vocab_split")
"""The options that candidates of every spec may support."""


def check_name(name: Any) -> None:
    if callable(name):
        raise UsageError("spec(...) decorates a reference without a name; write @lossgate.spec('focal') above it")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", name):
        raise UsageError(f"spec({name!r}): expected a name of letters, digits, '_', '-' and '.', such as 'focal_nll'")


def check_names(argument: str, given: Any, known: Iterable[str], where: str) -> tuple[str, ...]:
    """Returns a tuple of some of the known names, at least one."""
    if isinstance(given, str) or not isinstance(given, Iterable) or not (names := tuple(given)):
        raise UsageError(f"{where}: {argument}={given!r}; expected a tuple of some of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UsageError(f"{where}: {argument} has {name!r}; {nearest(str(name), known)}")
    return names


def check_batch(batch: Any, heads: Sequence[str], where: str) -> type[Batch]:
    """Returns a batch class, none of whose fields is an input of one of the heads, too."""
    if not isinstance(batch, type) or not issubclass(batch, Batch):
        raise UsageError(f"{where}: batch is {batch!r}; expected a class derived from lossgate.Batch")
    for head in heads:
        for name in fields_of(batch):
            if name in HEADS[head].leaves:
                raise UsageError(
                    f"{where}: field {name!r} of {batch.__name__} is also an input of head {head!r}; "
                    f"call it otherwise, such as 'token_{name}', or leave {head!r} out of heads="
                )
    return batch


def check_options(options: Any, where: str) -> type:
    if not isinstance(options, type) or not is_dataclass(options):
        raise UsageError(f"{where}: options is {options!r}; expected a class derived from lossgate.Options")
    return options


def check_option_names(options: Sequence[Option], named: Mapping[str, Iterable[str]], where: str) -> None:
    """Checks that no option has a reserved name, and that every argument names options.

    Args:
        options: of the spec.
        named: the options that each argument names.
        where: how messages begin.
    """
    known = [option.name for option in options]
    for name in RESERVED_OPTIONS:
        if name in known:
            raise UsageError(f"{where}: option {name!r} is one that every spec has; call it otherwise")
    for argument, names in named.items():
        for name in names:
            if name not in known:
                raise UsageError(f"{where}: {argument} names {name!r}, which is no option; {nearest(name, known)}")


def check_divisor(argument: str, option: Option | None, none: bool, where: str) -> None:
    """Checks that an option that divides the logits has numbers above 0 only.

    Args:
        argument: of ``spec``.
        option: that it names, if any.
        none: whether None is allowed, too.
        where: how messages begin.
    """
    for value in () if option is None else (option.interval or option.choices):
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not number and not (none and value is None):
            expected = "numbers above 0, or None" if none else "numbers above 0"
            raise UsageError(f"{where}: {argument} is an option with the value {value!r}; expected {expected}")


def check_metrics(metrics: Any, where: str) -> dict[str, Metric]:
    """Returns metrics by name."""
    if not isinstance(metrics, Mapping):
        raise UsageError(f"{where}: metrics={metrics!r}; expected a mapping, such as {{'accuracy': 'what it means'}}")
    found = {name: Metric(meaning=given) if isinstance(given, str) else given for name, given in metrics.items()}
    for name, metric in found.items():
        if not isinstance(metric, Metric):
            raise UsageError(f"{where}: metrics[{name!r}] is {metric!r}; expected what it means, or a lossgate.Metric")
        if name in RETURNED or str(name).startswith("grad of "):
            raise UsageError(f"{where}: metrics has {name!r}, which is an output of its own; call the metric otherwise")
        if metric.reduction not in get_args(Reduction):
            raise UsageError(
                f"{where}: metrics[{name!r}] has reduction={metric.reduction!r}; expected one of "
                f"{', '.join(get_args(Reduction))}. A mean is a sum that is already divided by a count of the batch"
            )
    return found


def check_scenarios(scenarios: Any, ties: Any, options: Sequence[Option], where: str) -> tuple[Option, ...]:
    """Returns the scenarios, if each has a name of its own and ties name their choices."""
    if not isinstance(scenarios, tuple) or not all(isinstance(scenario, Option) for scenario in scenarios):
        raise UsageError(f"{where}: scenarios={scenarios!r}; expected a tuple of lossgate.Option(name=..., ...)")
    taken = {option.name for option in options}
    for scenario in scenarios:
        if scenario.name in taken:
            raise UsageError(f"{where}: {scenario.name!r} is the name of two options or scenarios; rename one")
        taken.add(scenario.name)
        if scenario.default not in scenario.choices or not all(isinstance(c, str) for c in scenario.choices):
            raise UsageError(
                f"{where}: scenario {scenario.name!r} has default={scenario.default!r} and "
                f"choices={scenario.choices!r}; expected a tuple of strings, the default among them"
            )
    choices = {scenario.name: scenario.choices for scenario in scenarios}
    for name, choice in ties.items():
        if choice not in choices.get(name, ()):
            raise UsageError(f"{where}: tie_scenarios has {name!r}: {choice!r}; expected a scenario and its choice")
    return scenarios


def check_goals(goals: Any, covered: Any, options: Sequence[str], where: str) -> dict[str, CoverageGoal]:
    """Returns the goals by name, if each can be reached and needs what exists."""
    for name, goal in dict(goals).items():
        of_goal = f"{where}: goal {name!r}"
        if not isinstance(goal, CoverageGoal):
            raise UsageError(f"{of_goal} is {goal!r}; expected lossgate.CoverageGoal(meaning=..., reached=...)")
        if name in {**TOKEN_GOALS, **FILTER_GOALS, **SHARDING_GOALS, **IDS_GOALS}:
            raise UsageError(f"{of_goal} is one that every loss has; call it otherwise")
        if goal.reached is None and covered is None:
            raise UsageError(f"{of_goal} does not say how it is reached; give it reached=, or the spec covered=")
        if goal.reached is not None:
            check_function("reached", goal.reached, ("values", "batch", "options"), of_goal)
        wanted = {"unreachable_if": (goal.unreachable_if, options), "heads": (goal.heads, HEADS)}
        for argument, (given, known) in {**wanted, "axes": (goal.axes, AXES)}.items():
            for one in given:
                if one not in known:
                    raise UsageError(f"{of_goal}: {argument} has {one!r}; {nearest(one, known)}")
    return dict(goals)


def check_mistakes(mistakes: Any, where: str) -> tuple[Mistake, ...]:
    if not isinstance(mistakes, tuple) or not all(isinstance(mistake, Mistake) for mistake in mistakes):
        raise UsageError(f"{where}: mistakes={mistakes!r}; expected a tuple of lossgate.Mistake(name=..., ...)")
    return mistakes


def check_sequences(trained_dim: Any, group_size: Any, where: str) -> None:
    if trained_dim not in ("token", "sequence"):
        raise UsageError(f"{where}: trained_dim={trained_dim!r}; expected 'token' or 'sequence'")
    if not is_plain(group_size) or not isinstance(group_size, int) or group_size < 1:
        raise UsageError(f"{where}: group_size={group_size!r}; expected a positive whole number, such as 2 for pairs")


def check_function(argument: str, given: Any, wanted: Sequence[str], where: str) -> Any:
    """Returns a function that can be called with so many positional arguments.

    Args:
        argument: of ``spec``, for the message.
        given: the function.
        wanted: the names of what it will be called with.
        where: how messages begin.
    """
    expected = f"expected a function of {', '.join(wanted)}"
    if not callable(given):
        raise UsageError(f"{where}: {argument} is {given!r}; {expected}")
    try:
        inspect.signature(given).bind(*wanted)
    except TypeError as error:
        raise UsageError(f"{where}: {argument} can't be called as it will be ({error}); {expected}") from None
    except ValueError:
        pass  # a function of C has no signature
    return given


def check_reference(reference: Any, is_spec: Callable[[Any], bool], where: str) -> None:
    if is_spec(reference):
        raise UsageError(f"{where} decorates {reference!r}, which is a spec already; decorate its function once")
    check_function("the reference", reference, ("values", "batch", "options"), where)
