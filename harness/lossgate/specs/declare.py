# SPDX-License-Identifier: Apache-2.0
"""What the author of a loss writes: ``@lossgate.spec`` on a dense reference."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, Literal

from torch import Tensor

from lossgate.base.argument import Argument, arguments
from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.specs.coverage_goals import CoverageGoal, Covered
from lossgate.specs.declared import check_name, declared
from lossgate.specs.option import Domain, Option
from lossgate.specs.outputs import Metric
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options
from lossgate.specs.spec import DrawFields, ExtraMetrics, Reference, Spec, trained_by_mask


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
        also_written: other functions ``(values, batch, options)`` that compute the same loss and
            metrics as kernels may write them, and that round otherwise: ``p * log p - p * log q``
            for ``p * (log p - log q)``. The noise of right kernels is that of all ways together.
        summary: one line for people; by default the first paragraph of the reference's docstring.
        source: the paper or project that the reference follows.

    Raises:
        UsageError: if the declaration contradicts itself. The message names the argument, and the
            nearest right spelling.
    """
    given = locals()  # every argument, by its name
    check_name(name)
    return partial(_made, declared(arguments(f"spec({name!r}, ", given)))


def _made(declaration: Mapping[str, Any], reference: Reference) -> Spec:
    """Returns the spec of a reference."""
    where = f"spec({declaration['name']!r})"
    if isinstance(reference, Spec):
        raise UsageError(f"{where} decorates {reference!r}, which is a spec already; decorate its function once")
    if inspect.isclass(reference) or not callable(reference):
        raise UsageError(f"{where} decorates {shown(reference)}; expected a function of values, batch, options")
    Argument(f"{where}(", "reference", reference).function("values", "batch", "options")
    summary = declaration["summary"] or _first_paragraph(reference) or declaration["name"]
    return Spec(**dict[str, Any](declaration, summary=summary, function=reference))


def _first_paragraph(reference: Reference) -> str:
    """Returns what a function's docstring says first, in one line; empty if it says nothing."""
    doc = inspect.getdoc(reference) if isinstance(reference, FunctionType) else None
    return " ".join((doc or "").split("\n\n")[0].split()).rstrip(".")
