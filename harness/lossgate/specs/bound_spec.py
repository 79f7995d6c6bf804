# SPDX-License-Identifier: Apache-2.0
"""A spec with the options of one problem: its reference, and what that computes from tensors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dense_losses import softcapped
from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.specs.heads import HEADS
from lossgate.specs.logit_filter import filters
from lossgate.specs.outputs import Metric, Output
from lossgate.specs.terms import Terms
from lossgate.specs.token_chunks import in_chunks
from lossgate.specs.token_values import TokenValues, token_values
from lossgate.specs.users_code import described, told_as

if TYPE_CHECKING:
    from lossgate.specs.spec import Spec  # it imports this module


@dataclass(frozen=True, kw_only=True)
class BoundSpec:
    """A spec with the options of one problem."""

    spec: "Spec"
    values: Mapping[str, Any]
    """The options that are not at their default."""
    options: Any
    """All options, as an object of ``Spec.options_type``."""
    returned: frozenset[Output] | None = None
    """The outputs that will be compared; None for all."""

    def returning(self, outputs: Collection[Output]) -> "BoundSpec":
        """Returns this spec for a candidate that returns only these outputs."""
        return replace(self, returned=frozenset(outputs))

    @property
    def temperature(self) -> float:
        """The number that divides the logits."""
        if self.spec.temperature is None:
            return 1.0
        return float(getattr(self.options, self.spec.temperature))

    @property
    def softcap(self) -> float | None:
        """The bound of logits; None for no bound."""
        return None if self.spec.softcap is None else getattr(self.options, self.spec.softcap)

    def capped(self, logits: Tensor) -> Tensor:
        """Returns logits after the soft-cap."""
        return logits if self.softcap is None else softcapped(logits, self.softcap)

    @property
    def token_stage(self) -> str:
        """A text of the options that change values per token. If it is equal for two sets of
        options, they have the same values per token.
        """
        return repr([getattr(self.options, name) for name in self.spec.logit_options])

    def token_values(self, head: str, leaves: Mapping[str, Tensor], fields: Mapping[str, Any]) -> TokenValues:
        """Returns the reference's values per token, from a head's inputs."""
        start = HEADS[head]
        if not start.has_logits:
            return TokenValues(logprobs=start.logits(leaves))
        ids = self.spec.gathered_ids
        used = {name: fields[name] for name in ("labels", ids) if name is not None}
        logit_filter = (self.options.top_k, self.options.top_p) if filters(self.options) else None

        def compute(leaves: Mapping[str, Tensor], fields: Mapping[str, Any]) -> TokenValues:
            logits = self.capped(start.logits(leaves))
            of_ids = None if ids is None else fields[ids]
            return token_values(self.spec.uses, logits, fields["labels"], self.temperature, of_ids, logit_filter)

        return in_chunks(start, leaves, used, compute)

    @property
    def ways(self) -> tuple[str, ...]:
        """The functions that compute the loss, in words: the reference, then ``also_written``."""
        others = range(1, len(self.spec.also_written) + 1)
        return ("its reference", *(f"number {i} of also_written=" for i in others))

    def loss(self, values: TokenValues, fields: Mapping[str, Any], way: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss and its metrics. The spec must have a loss.

        Args:
            values: of each token.
            fields: of the batch.
            way: the number in ``ways`` of the function to call; 0 is the reference.

        Raises:
            UsageError: if the function returns anything else.
        """
        who = f"spec {self.spec.name!r}: {self.ways[way]}"
        written = (self.spec, *self.spec.also_written)[way]
        with told_as(who):
            returned = written(values, self.spec.batch(fields), self.options)
        loss, metrics = loss_and_metrics(returned, who)
        if self.spec.extra_metrics is not None and self._wants_more_than(metrics):
            who_else = f"spec {self.spec.name!r}: its extra_metrics="
            with told_as(who_else):
                extra = self.spec.extra_metrics(values, self.spec.batch(fields), self.options)
            metrics |= checked_mapping(extra, who_else)
        check_metrics(metrics, self.spec.metrics, [] if self.returned is None else self.returned, who)
        dtype = next(iter(values.given.values())).dtype
        check_scalars(loss, metrics, dtype, who)
        return loss, metrics

    def _wants_more_than(self, metrics: Collection[str]) -> bool:
        return self.returned is None or any(o.kind == "metric" and o.name not in metrics for o in self.returned)


def loss_and_metrics(returned: Any, who: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Splits the result of a reference into the loss and the metrics.

    Args:
        returned: the result.
        who: the beginning of messages, such as "spec 'focal': its reference".

    Raises:
        UsageError: if it is no loss, loss and metrics, or ``Terms``.
    """
    if isinstance(returned, Terms):
        with told_as(f"{who} returned terms that"):  # their sum is computed here
            return returned.loss, dict(returned.metrics)
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"{who} returned {type(returned).__name__}; expected the loss as a tensor, (loss, metrics) or "
            "lossgate.Terms(...)"
        )
    return loss, checked_mapping(metrics, who)


def checked_mapping(metrics: Any, who: str) -> dict[str, Tensor]:
    if not isinstance(metrics, Mapping):
        raise UsageError(f"{who} returned metrics as {type(metrics).__name__}; expected a dict of scalars by name")
    return dict(metrics)


def check_scalars(loss: Any, metrics: Mapping[str, Any], dtype: torch.dtype, who: str) -> None:
    """Checks that loss and metrics are scalars, and in the dtype of the values per token."""
    for name, scalar in (("", loss), *metrics.items()):
        what = f"metric {name!r}" if name else "loss"
        if not isinstance(scalar, Tensor) or scalar.dim():
            raise UsageError(f"{who} returned {what} as {described(scalar)}; expected a scalar tensor: add up entries")
        if scalar.dtype != dtype:
            got, own = (str(one).removeprefix("torch.") for one in (scalar.dtype, dtype))
            raise UsageError(
                f"{who} returned {what} in {got}, but computes in {own}; in torch a count divided by a count is "
                "float32: convert the count first, as in count.to(values.logprobs) / total"
            )


def check_metrics(
    metrics: Mapping[str, Any], declared: Mapping[str, Metric], returned: Collection[Output], who: str
) -> None:
    """Checks that the reference returned only declared metrics, and all those of the candidate."""
    for name in metrics:
        if name not in declared:
            raise UsageError(f"{who} returned metric {name!r}, which metrics= lacks; {nearest(str(name), declared)}")
    if missing := [output.name for output in returned if output.kind == "metric" and output.name not in metrics]:
        raise UsageError(f"{who} did not return metric {missing[0]!r}, which the candidate returns; return it, too")
