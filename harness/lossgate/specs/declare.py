# SPDX-License-Identifier: Apache-2.0
"""What the author of a loss writes: ``@lossgate.spec`` on a dense reference."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Literal

from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.specs.coverage import CoverageGoal, Covered
from lossgate.specs.declared import (
    check_also_written,
    check_batch,
    check_divisor,
    check_gathered_ids,
    check_goals,
    check_groups,
    check_metrics,
    check_mistakes,
    check_name,
    check_names,
    check_option_names,
    check_options,
    check_outputs,
    check_scenarios,
    check_sequences,
    check_text,
    check_truth,
)
from lossgate.specs.heads import HEADS
from lossgate.specs.inputs import Batch
from lossgate.specs.logit_filter import FilterOptions
from lossgate.specs.metric import Metric
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import COMMON_OPTIONS, EMPTY, Domain, Option, options_of
from lossgate.specs.record import Options, fields_of
from lossgate.specs.spec import DrawFields, ExtraMetrics, Reference, Spec, trained_by_mask
from lossgate.specs.token_values import USES
from lossgate.specs.users_code import check_function


class NoOptions(Options):
    """The options of a spec that has none."""


def spec(
    name: str,
    *,
    batch: type[Batch] = Batch,
    options: type = NoOptions,
    choices: Mapping[str, Domain] | None = None,
    option_groups: tuple[tuple[str, ...], ...] = (),
    heads: tuple[str, ...] | None = None,
    uses: tuple[str, ...] = ("logprobs",),
    gathered_ids: str | None = None,
    temperature: str | None = None,
    softcap: str | None = None,
    outputs: tuple[str, ...] | None = None,
    metrics: Mapping[str, Metric | str] | None = None,
    extra_metrics: ExtraMetrics | None = None,
    scenarios: tuple[Option, ...] = (),
    draw: DrawFields | None = None,
    trained: Callable[[Any], Tensor] = trained_by_mask,
    trained_dim: Literal["token", "sequence"] = "token",
    group_size: int = 1,
    goals: Mapping[str, CoverageGoal] | None = None,
    covered: Covered | None = None,
    kinks: bool = False,
    stop_gradient: bool = False,
    tie_scenarios: Mapping[str, str] | None = None,
    mistakes: tuple[Mistake, ...] = (),
    also_written: tuple[Reference, ...] = (),
    summary: str | None = None,
    source: str = "",
) -> Callable[[Reference], Spec]:
    """Declares the decorated function the dense reference of a loss.

    For example::

        @lossgate.spec("focal", options=FocalOptions)
        def focal(values, batch, options):
            logprobs = torch.where(batch.mask, values.logprobs, -1.0)
            losses = -((1 - logprobs.exp()) ** options.gamma) * logprobs
            return torch.where(batch.mask, losses, 0.0).sum() / batch.valid_tokens.clamp(min=1)

    It is called with the ``TokenValues`` that it ``uses``, the whole batch as an object of the
    batch class, and an object of the option class; all floats are float64. It returns the loss, a
    scalar; or ``(loss, metrics)``; or ``lossgate.Terms``. It must be differentiable and run under
    ``torch.vmap``: no ``.item()``, no ``if`` on a tensor. What is masked may hold NaN: select it
    away with ``torch.where``.

    Args:
        name: of the spec, for people and files.
        batch: a class derived from ``lossgate.Batch``, with ``lossgate.field`` for each input that
            the loss needs beside the labels and the mask.
        options: a class derived from ``lossgate.Options``, with ``lossgate.option`` for each; or
            any frozen dataclass whose fields' metadata has a ``meaning``.
        choices: what problems draw for an option, where the option class does not say it: a tuple
            of values, or ``lossgate.Between(low, high)``.
        option_groups: options that are valid only together. They are drawn from the combinations
            that the option class accepts; it refuses others with ``ValueError``.
        heads: where a kernel may start, of "hidden", "logits", "logprobs", "values" and "rewards".
            By default "hidden" and "logits", and "logprobs" if the loss uses the log-probabilities
            of the labels alone.
        uses: what the loss is given of each token, of the names in ``TokenValues``.
        gathered_ids: the field ``[token, k]`` of vocabulary ids whose log-probabilities
            ``values.logprobs`` holds, if not the labels'. A loss that uses the logits reads them at
            these ids itself; goals of layouts then ask for these ids.
        temperature: the option that divides the logits. The loss gets values after it, and divides
            what else it needs, such as a teacher's logits, itself.
        softcap: the option that bounds the logits; likewise.
        outputs: what a candidate may return beside metrics. The first is required, and carries
            gradients by default. By default the loss, and "logprobs" if the loss uses the labels'
            and every head gives them.
            Without "loss", the reference returns None.
        metrics: what else a candidate may return, each a ``lossgate.Metric`` or what it means.
        extra_metrics: ``(values, batch, options) -> metrics`` that cost more than the loss. They
            are computed only for a candidate that returns one of them.
        scenarios: ways in which the fields may be drawn: choices that problems draw, and
            ``context.scenario`` tells.
        draw: ``context -> fields``, for fields that are drawn together.
        trained: ``batch -> [T]`` bool, the tokens that count for the loss; by default the mask. If
            none does, the problem shows nothing. ``[S]`` if ``trained_dim`` is "sequence".
        trained_dim: whether ``trained`` tells of tokens or of sequences.
        group_size: neighbouring sequences that belong together, such as 2 for preference pairs. dp
            keeps them on one rank.
        goals: situations that problems must reach before a verdict counts, beside those of every
            loss.
        covered: ``(batch of a problem, options) -> `` the names of goals that it reaches, for goals
            without ``reached=``. One function for several goals is shorter where they share work.
        kinks: the loss has clips or comparisons. Tokens that are too near to one of them, for the
            dtype, are masked.
        stop_gradient: the loss stops gradients on purpose, so that its gradient is not its
            derivative. ``lossgate spec check`` then does not compare them.
        tie_scenarios: scenarios in which every comparison is a tie that does not matter to loss and
            gradients: nothing is masked.
        mistakes: what kernels of it have got wrong, for tests of one's own tests.
        also_written: other functions ``(values, batch, options)`` that compute the same loss and
            metrics as kernels may write them, and that round otherwise: ``p * log p - p * log q``
            for ``p * (log p - log q)``. The noise of right kernels is that of all ways together.
        summary: one line for people; by default the first paragraph of the reference's docstring.
        source: the paper or project that the reference follows.

    Raises:
        UsageError: if the declaration contradicts itself. The message names the argument, and the
            nearest right spelling.
    """
    where = f"spec({name!r})"
    check_name(name)
    own_uses = check_names("uses", uses, USES, where)
    of_labels = set(own_uses) == {"logprobs"} and gathered_ids is None
    default_heads = ("hidden", "logits", "logprobs") if of_labels else ("hidden", "logits")
    own_heads = check_names("heads", default_heads if heads is None else heads, HEADS, where)
    batch_type = check_batch(batch, own_heads, where)
    check_gathered_ids(gathered_ids, batch_type, where)
    own_outputs = check_outputs(outputs, own_uses, own_heads, gathered_ids, where)
    own_options = _options(check_options(options, where), {} if choices is None else choices, where)
    groups = check_groups(option_groups, where)
    if issubclass(options, FilterOptions) and temperature is None:
        temperature = "temperature"
    named = {"temperature": _one(temperature), "softcap": _one(softcap)}
    check_option_names(own_options, {**named, "option_groups": [o for group in groups for o in group]}, where)
    by_name = {option.name: option for option in own_options}
    check_divisor("temperature", by_name.get(temperature or ""), False, where)
    check_divisor("softcap", by_name.get(softcap or ""), True, where)
    for argument, (function, wanted) in {
        "draw": (draw, ("context",)),
        "trained": (trained, ("batch",)),
        "covered": (covered, ("batch", "options")),
        "extra_metrics": (extra_metrics, ("values", "batch", "options")),
    }.items():
        if function is not None:
            check_function(argument, function, wanted, where)
    check_also_written(also_written, where)
    check_sequences(trained_dim, group_size, where)
    ties = {} if tie_scenarios is None else tie_scenarios
    own_scenarios = check_scenarios(scenarios, ties, own_options, where)
    own_metrics = check_metrics({} if metrics is None else metrics, where)
    if "loss" not in own_outputs and (own_metrics or kinks or stop_gradient or extra_metrics or also_written):
        raise UsageError(
            f"{where}: outputs={own_outputs!r} has no 'loss', so nothing calls the reference; drop metrics=, "
            "extra_metrics=, kinks=, stop_gradient= and also_written=, or add 'loss'"
        )
    made: dict[str, Any] = {
        "name": name,
        "source": "" if source == "" else check_text("source", source, where),
        "batch_type": batch_type,
        "options_type": options,
        "options": own_options,
        "option_groups": groups,
        "inputs": {head: _inputs_class(name, head, batch_type) for head in own_heads},
        "uses": tuple(name for name in USES if name in own_uses),
        "gathered_ids": gathered_ids,
        "temperature": temperature,
        "softcap": softcap,
        "outputs": own_outputs,
        "metrics": own_metrics,
        "extra_metrics": extra_metrics,
        "scenarios": own_scenarios,
        "draw": draw,
        "trained": trained,
        "trained_dim": trained_dim,
        "group_size": group_size,
        "goals": check_goals(
            {} if goals is None else goals, covered, [*by_name, *COMMON_OPTIONS, EMPTY.name], own_scenarios, where
        ),
        "covered": covered,
        "kinks": check_truth("kinks", kinks, where),
        "stop_gradient": check_truth("stop_gradient", stop_gradient, where),
        "tie_scenarios": dict(ties),
        "mistakes": check_mistakes(mistakes, where),
        "also_written": tuple(also_written),
    }
    return partial(_declared, made, None if summary is None else check_text("summary", summary, where))


def _declared(made: Mapping[str, Any], summary: str | None, reference: Reference) -> Spec:
    where = f"spec({made['name']!r})"
    if isinstance(reference, Spec):
        raise UsageError(f"{where} decorates {reference!r}, which is a spec already; decorate its function once")
    check_function("the reference", reference, ("values", "batch", "options"), where)
    if inspect.isclass(reference):
        raise UsageError(f"{where}: the reference is {reference!r}; expected a function of values, batch, options")
    return Spec(**made, summary=summary or _first_paragraph(reference) or made["name"], function=reference)


def _first_paragraph(reference: Reference) -> str:
    """Returns what a function's docstring says first, in one line; empty if it says nothing."""
    doc = inspect.getdoc(reference) if isinstance(reference, FunctionType) else None
    return " ".join((doc or "").split("\n\n")[0].split()).rstrip(".")


def _options(options: type, choices: Mapping[str, Domain], where: str) -> tuple[Option, ...]:
    try:
        return options_of(options, choices)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _one(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _inputs_class(name: str, head: str, batch_type: type[Batch]) -> type[Batch]:
    """Makes the class of a rank's inputs: the leaves of the head, and the batch."""
    title = "".join(part[:1].upper() + part[1:] for part in re.split(r"[_.-]", f"{name}_{head}"))
    doc = f"""What a kernel of spec {name} gets on a rank at head "{head}"."""
    bases: tuple[Any, ...] = (HEADS[head].inputs, batch_type)
    made = type(title, bases, {"__module__": "lossgate.inputs"})
    made.__doc__ = "\n".join((doc, "", *(f"{name}: {field.described}" for name, field in fields_of(made).items())))
    return made
