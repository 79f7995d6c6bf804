# SPDX-License-Identifier: Apache-2.0
"""Checks what ``lossgate.spec`` is given, so that a slip is reported where it is made."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, get_args

from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES
from lossgate.base.names import DTYPES, nearest_dtype
from lossgate.base.spelling import nearest
from lossgate.specs.coverage import BIAS_GOALS, TOKEN_GOALS, CoverageGoal
from lossgate.specs.heads import HEADS
from lossgate.specs.inputs import Batch
from lossgate.specs.logit_filter import FILTER_GOALS
from lossgate.specs.metric import Metric, Reduction
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import COMMON_OPTIONS, EMPTY, Option
from lossgate.specs.outputs import RETURNED
from lossgate.specs.record import Field, fields_of
from lossgate.specs.sharding_goals import IDS_GOALS, SHARDING_GOALS
from lossgate.specs.users_code import check_function

_LARGEST_GROUP = 64
"""Problems hold whole groups of sequences, and stay small."""


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
    return tuple(dict.fromkeys(names))


def check_truth(argument: str, given: Any, where: str) -> bool:
    if not isinstance(given, bool):
        raise UsageError(f"{where}: {argument}={given!r}; expected True or False")
    return given


def check_text(argument: str, given: Any, where: str) -> str:
    """Returns a text for people, in one line."""
    if not isinstance(given, str) or not given.strip():
        raise UsageError(f"{where}: {argument} is {given!r}; expected words")
    return " ".join(given.split())


def check_outputs(given: Any, uses: Sequence[str], heads: Sequence[str], ids: Any, where: str) -> tuple[str, ...]:
    """Returns the names of outputs that are there: what a kernel returns for each token, the loss
    must use.
    """
    per_token = [head for head in heads if HEADS[head].has_logits or head == "logprobs"]
    has = {"logprobs": "logprobs" in uses and ids is None, "token_entropy": "entropy" in uses}
    if given is None:
        return ("loss", "logprobs") if has["logprobs"] and len(per_token) == len(heads) else ("loss",)
    outputs = check_names("outputs", given, RETURNED, where)
    for name, there in has.items():
        if name not in outputs:
            continue
        if not there:
            wanted = "'logprobs' in uses=, and no gathered_ids=" if name == "logprobs" else "'entropy' in uses="
            raise UsageError(f"{where}: outputs has {name!r}, which needs {wanted}")
        if other := [head for head in heads if head not in per_token]:
            raise UsageError(f"{where}: outputs has {name!r}, which head {other[0]!r} does not give; drop one of them")
    return outputs


def check_gathered_ids(given: Any, batch: type[Batch], where: str) -> None:
    if given is None:
        return
    fields = fields_of(batch)
    if not isinstance(given, str) or given not in fields:
        raise UsageError(f"{where}: gathered_ids={given!r} is no field; {nearest(str(given), fields)}")
    own: Field = fields[given]
    if own.dtype != "int64" or len(own.dims) != 2 or own.dims[0] != "token":
        raise UsageError(
            f"{where}: gathered_ids names {given!r}, which is {own.dtype} {own.shape}; expected ids, such as "
            f"{given}: Tensor = lossgate.field('token k', ..., dtype='int64', draw=...)"
        )


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
    known, named = [option.name for option in options], {argument: [*names] for argument, names in named.items()}
    for name in (*COMMON_OPTIONS, EMPTY.name):
        if name in known:
            raise UsageError(f"{where}: option {name!r} is one that every spec has; call it otherwise")
    for argument, names in named.items():
        for name in names:
            if name not in known:
                raise UsageError(f"{where}: {argument} names {name!r}, which is no option; {nearest(str(name), known)}")
    if named["temperature"] and named["temperature"] == named["softcap"]:
        raise UsageError(f"{where}: temperature and softcap are both {named['softcap'][0]!r}; give each an option")


def check_groups(groups: Any, where: str) -> tuple[tuple[str, ...], ...]:
    """Returns groups of options, none of which is in two."""
    expected = "expected a tuple of tuples of options, such as (('top_k', 'top_p'),)"
    if not isinstance(groups, tuple) or not all(isinstance(group, tuple) for group in groups):
        raise UsageError(f"{where}: option_groups={groups!r}; {expected}")
    names = [name for group in groups for name in group]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{where}: option_groups has {name!r} twice; join its groups")
    return groups


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
        check_text("the name of a metric", name, where)
        if not isinstance(metric, Metric):
            raise UsageError(f"{where}: metrics[{name!r}] is {metric!r}; expected what it means, or a lossgate.Metric")
        check_text(f"the meaning of metric {name!r}", metric.meaning, where)
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
    taken = {*COMMON_OPTIONS, EMPTY.name, *(option.name for option in options)}
    for scenario in scenarios:
        check_text("the name of a scenario", scenario.name, where)
        check_text(f"the meaning of scenario {scenario.name!r}", scenario.meaning, where)
        if scenario.name in taken:
            raise UsageError(f"{where}: {scenario.name!r} is the name of two options or scenarios; rename one")
        taken.add(scenario.name)
        listed = scenario.choices, scenario.on_request
        texts = all(isinstance(own, tuple) and all(isinstance(c, str) for c in own) for own in listed)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not texts or scenario.default not in scenario.choices:
            raise UsageError(
                f"{where}: scenario {scenario.name!r} has default={scenario.default!r} and "
                f"choices={scenario.choices!r}; expected a tuple of strings, the default among them"
            )
    choices = {scenario.name: scenario.choices for scenario in scenarios}
    if not isinstance(ties, Mapping):
        raise UsageError(f"{where}: tie_scenarios={ties!r}; expected a mapping, such as {{'reference': 'equal'}}")
    for name, choice in ties.items():
        if choice not in choices.get(name, ()):
            raise UsageError(f"{where}: tie_scenarios has {name!r}: {choice!r}; expected a scenario and its choice")
    return scenarios


def check_goals(
    goals: Any, covered: Any, options: Sequence[str], scenarios: Sequence[Option], where: str
) -> dict[str, CoverageGoal]:
    """Returns the goals by name, if each can be reached and needs what exists."""
    if not isinstance(goals, Mapping):
        raise UsageError(f"{where}: goals={goals!r}; expected a mapping of names to lossgate.CoverageGoal(...)")
    taken = {f"{scenario.name}: {choice}" for scenario in scenarios for choice in scenario.choices}
    options = [*options, *(scenario.name for scenario in scenarios)]
    for name, goal in goals.items():
        of_goal = f"{where}: goal {check_text('the name of a goal', name, where)!r}"
        if name in taken:
            raise UsageError(f"{of_goal} is the choice of a scenario, which is a goal anyway; call it otherwise")
        if not isinstance(goal, CoverageGoal):
            raise UsageError(f"{of_goal} is {goal!r}; expected lossgate.CoverageGoal(meaning=..., reached=...)")
        if name in {**TOKEN_GOALS, **BIAS_GOALS, **FILTER_GOALS, **SHARDING_GOALS, **IDS_GOALS}:
            raise UsageError(f"{of_goal} is one that every loss has; call it otherwise")
        check_text("its meaning", goal.meaning, of_goal)
        if goal.reached is None and covered is None:
            raise UsageError(f"{of_goal} does not say how it is reached; give it reached=, or the spec covered=")
        if goal.reached is not None:
            check_function("reached", goal.reached, ("values", "batch", "options"), of_goal)
        wanted = {"unreachable_if": (goal.unreachable_if, options), "heads": (goal.heads, HEADS)}
        for argument, (given, known) in {**wanted, "axes": (goal.axes, AXES), "dtypes": (goal.dtypes, DTYPES)}.items():
            fits: bool = isinstance(given, Mapping if argument == "unreachable_if" else tuple)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not fits:
                kind = "a mapping of options to values" if argument == "unreachable_if" else "a tuple of names"
                raise UsageError(f"{of_goal}: {argument}={given!r}; expected {kind}")
            for one in given:
                if one not in known:
                    near = nearest_dtype if argument == "dtypes" else nearest
                    raise UsageError(f"{of_goal}: {argument} has {one!r}; {near(str(one), known)}")
        for option, values in goal.unreachable_if.items():
            if isinstance(values, str) or not isinstance(values, Container):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"{of_goal}: unreachable_if[{option!r}]={values!r}; expected a tuple of values")
    return dict(goals)


def check_mistakes(mistakes: Any, where: str) -> tuple[Mistake, ...]:
    if not isinstance(mistakes, tuple) or not all(isinstance(mistake, Mistake) for mistake in mistakes):
        raise UsageError(f"{where}: mistakes={mistakes!r}; expected a tuple of lossgate.Mistake(name=..., ...)")
    for mistake in mistakes:
        of_mistake = f"{where}: mistake {check_text('the name of a mistake', mistake.name, where)!r}"
        check_text("its sentence", mistake.sentence, of_mistake)
        check_function("options", mistake.options, ("options",), of_mistake)
        check_function("inputs", mistake.inputs, ("inputs",), of_mistake)
    return mistakes


def check_also_written(given: Any, where: str) -> None:
    if not isinstance(given, tuple | list):
        raise UsageError(f"{where}: also_written={given!r}; expected a tuple of functions, such as ({given!r},)")
    for number, way in enumerate(given, 1):
        check_function(f"number {number} of also_written=", way, ("values", "batch", "options"), where)


def check_sequences(trained_dim: Any, group_size: Any, where: str) -> None:
    if trained_dim not in ("token", "sequence"):
        raise UsageError(f"{where}: trained_dim={trained_dim!r}; expected 'token' or 'sequence'")
    whole = isinstance(group_size, int) and not isinstance(group_size, bool)
    if not whole or not 1 <= group_size <= _LARGEST_GROUP:
        raise UsageError(
            f"{where}: group_size={group_size!r}; expected a whole number from 1 to {_LARGEST_GROUP}, such as 2 for "
            "pairs"
        )
