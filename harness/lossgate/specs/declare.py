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
    ``torch.vmap``: no ``.item()``, no ``if`` on a tensor. Masked entries may hold NaN: select them
    away with ``torch.where``.

    Args:
        name: of the spec, for people and files.
        batch: a class derived from ``lossgate.Batch``, with ``lossgate.field`` for each input that
            the loss needs in addition to the labels and the mask.
        options: a class derived from ``lossgate.Options``, with ``lossgate.option`` for each; or
            any frozen dataclass whose fields' metadata has a ``meaning``.
        choices: by option, the values that problems draw, if the option class does not declare
            them: a tuple of values, or ``lossgate.Between(low, high)``.
        option_groups: options that are valid only together. They are drawn from the combinations
            that the option class accepts; it refuses others with ``ValueError``.
        heads: where a kernel may start, of "hidden", "logits", "logprobs", "values" and "rewards".
            By default "hidden" and "logits", and "logprobs" if the loss uses the log-probabilities
            of the labels alone.
        uses: the values per token that the loss is given, of the names in ``TokenValues``.
        gathered_ids: the field ``[token, k]`` of vocabulary ids whose log-probabilities
            ``values.logprobs`` holds; by default it holds those of the labels. A loss that uses the
            logits must look up these ids itself. Goals of layouts then ask for these ids.
        temperature: the option that divides the logits. The loss gets values that are divided
            already. It must itself divide other logits, such as a teacher's.
        softcap: the option that bounds the logits; likewise.
        outputs: the outputs that a candidate may return in addition to metrics. The first is
            required, and carries gradients by default. By default they are the loss, and "logprobs"
            if the loss uses those of the labels and every head gives them. Without "loss", the
            reference returns None.
        metrics: further scalars that a candidate may return, by name: a ``lossgate.Metric``, or
            what it means.
        extra_metrics: ``(values, batch, options) -> metrics`` that cost more than the loss. They
            are computed only for a candidate that returns one of them.
        scenarios: ways in which fields may be drawn. Problems draw a choice of each scenario, and
            ``context.scenario`` has it.
        draw: ``context -> fields``, for fields that are drawn together.
        trained: ``batch -> [T]`` bool, the tokens that count for the loss; by default the mask. A
            problem in which none counts shows nothing. ``[S]`` if ``trained_dim`` is "sequence".
        trained_dim: whether ``trained`` returns tokens or sequences.
        group_size: the number of neighbouring sequences that belong together, such as 2 for
            preference pairs. dp keeps them on one rank.
        goals: situations that problems must reach before a verdict counts, in addition to those of
            every loss.
        covered: ``(batch of a problem, options) -> `` the names of goals that it reaches, for goals
            without ``reached=``. A single function for several goals can share work.
        kinks: whether the loss has clips or comparisons. Tokens that are too near to one of them
            for the dtype are masked.
        stop_gradient: whether the loss stops gradients on purpose, so that its gradient is not its
            derivative. ``lossgate spec check`` then does not compare the two.
        tie_scenarios: choices of scenarios, by scenario, in which every comparison is a tie that
            changes neither the loss nor gradients. Then no token is masked for it.
        also_written: other functions ``(values, batch, options)`` that compute the same loss and
            metrics, but round differently, as kernels may: ``p * log p - p * log q`` instead of
            ``p * (log p - log q)``. The noise of right kernels is that of all ways together.
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
    """Returns the first paragraph of a function's docstring in one line; "" if it has none."""
    doc = inspect.getdoc(reference) if isinstance(reference, FunctionType) else None
    return " ".join((doc or "").split("\n\n")[0].split()).rstrip(".")
