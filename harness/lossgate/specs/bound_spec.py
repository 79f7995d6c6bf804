# SPDX-License-Identifier: Apache-2.0
"""A spec with the options of one problem, and what its reference computes of tensors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dense_losses import softcapped
from lossgate.specs.heads import HEADS
from lossgate.specs.logit_filter import filters
from lossgate.specs.outputs import Output
from lossgate.specs.reference_result import check_metrics, check_scalars, checked_mapping, loss_and_metrics
from lossgate.specs.token_chunks import in_chunks
from lossgate.specs.token_stage import token_values
from lossgate.specs.token_values import TokenValues
from lossgate.specs.users_code import told_as

if TYPE_CHECKING:
    from lossgate.specs.spec import Spec  # which makes them


@dataclass(frozen=True, kw_only=True)
class BoundSpec:
    """A spec with the options of one problem."""

    spec: "Spec"
    values: Mapping[str, Any]
    """The options that are not at their default."""
    options: Any
    """The same as an object of ``Spec.options_type``."""
    returned: frozenset[Output] | None = None
    """The outputs that will be compared; None for all."""

    def returning(self, outputs: Collection[Output]) -> "BoundSpec":
        """Returns the same, for a candidate that returns these outputs."""
        return replace(self, returned=frozenset(outputs))

    @property
    def temperature(self) -> float:
        """The number that divides the logits."""
        return 1.0 if self.spec.temperature is None else float(getattr(self.options, self.spec.temperature))

    @property
    def softcap(self) -> float | None:
        """The bound of logits; None for no bound."""
        return None if self.spec.softcap is None else getattr(self.options, self.spec.softcap)

    def capped(self, logits: Tensor) -> Tensor:
        """Returns logits after the soft-cap."""
        return logits if self.softcap is None else softcapped(logits, self.softcap)

    @property
    def token_stage(self) -> str:
        """Names what the values per token are computed with: options of one name share them."""
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
            logits, of_ids = self.capped(start.logits(leaves)), None if ids is None else fields[ids]
            return token_values(self.spec.uses, logits, fields["labels"], self.temperature, of_ids, logit_filter)

        return in_chunks(start, leaves, used, compute)

    @property
    def ways(self) -> tuple[str, ...]:
        """What to call each way in which the loss is written, the reference first."""
        others = range(1, len(self.spec.also_written) + 1)
        return ("its reference", *(f"number {i} of also_written=" for i in others))

    def loss(self, values: TokenValues, fields: Mapping[str, Any], way: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss and its metrics, by default as the reference has them. For specs that
        have a loss.

        Args:
            values: of each token.
            fields: of the batch.
            way: which of the ``ways`` to compute it.

        Raises:
            UsageError: if the reference returns something else.
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
