# SPDX-License-Identifier: Apache-2.0
"""How the ranks' results make the whole."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from lossgate.errors import UsageError
from lossgate.layout import AXES, Axis

Placement = Literal["replicate", "sum", "avg", "min", "max"]
Placements = Mapping[Axis, Placement]

_DEFAULT: Placements = {"dp": "sum", "cp": "sum", "tp": "replicate"}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """How local results make the global one, in DTensor's words, axis by axis.

    ``"replicate"``: every rank has it (checked, bit by bit). ``"sum"``, ``"avg"``: the sum, the mean over the ranks
    is it; ``"min"``, ``"max"`` likewise, for metrics. What is left out keeps its default: loss and metrics are summed over
    dp and cp (of a metric that is an extremum, the extremum is taken) and replicated over tp; so is the gradient of weight
    and bias, and that of hidden is replicated over tp.

    Every rank's loss gets the same upstream gradient, as a trainer calls ``loss.backward()`` on each. Along an axis
    that splits a tensor's own dim its gradient is concatenated; ``"avg"`` there divides by the axis's size, for
    kernels that leave that factor to the optimizer (Megatron-LM, FSDP).
    """

    loss: Placements = field(default_factory=dict)
    logprobs: Placements = field(default_factory=dict)
    metrics: Mapping[str, Placements] = field(default_factory=dict)
    grads: Mapping[str, Placements] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = {"loss": self.loss, "logprobs": self.logprobs}
        named |= {f"metrics[{k!r}]": v for k, v in self.metrics.items()} | {
            f"grads[{k!r}]": v for k, v in self.grads.items()
        }
        for name, placements in named.items():
            for axis, placement in placements.items():
                if axis not in AXES:
                    raise UsageError(f"Contract({name}): unknown mesh axis {axis!r}; expected one of {', '.join(AXES)}")
                if placement not in get_args(Placement):
                    raise UsageError(
                        f"Contract({name}): {axis}={placement!r}; expected one of {', '.join(get_args(Placement))}"
                    )
                if placement in ("min", "max") and not name.startswith("metrics"):
                    raise UsageError(f"Contract({name}): {axis}={placement!r}; only metrics are combined so")

    def of_loss(self) -> Placements:
        return {**_DEFAULT, **self.loss}

    def of_token_values(self) -> Placements:
        """Of log-probabilities, and of entropies if they are an output."""
        return {"tp": "replicate", **self.logprobs}

    def of_metric(self, name: str, reduction: Literal["sum", "min", "max"] = "sum") -> Placements:
        """``reduction``: the spec's, over the ranks that share the batch."""
        return {"dp": reduction, "cp": reduction, "tp": "replicate", **self.metrics.get(name, {})}

    def of_grad(self, leaf: str) -> Placements:
        """Of the gradient of an input: "hidden", "weight", "bias" or "logits"."""
        return {**_DEFAULT, **self.grads.get(leaf, {})}
