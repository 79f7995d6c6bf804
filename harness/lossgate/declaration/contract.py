# SPDX-License-Identifier: Apache-2.0
"""How the results of ranks are put together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from lossgate.base.argument import Argument, arguments
from lossgate.base.layout import AXES, Axis
from lossgate.specs.outputs import Output

Placement = Literal["replicate", "sum", "avg", "min", "max"]
Placements = Mapping[Axis, Placement]

_DEFAULT: Placements = {"dp": "sum", "cp": "sum", "tp": "replicate"}

_EXAMPLES = {"metrics": "{'entropy': {'dp': 'avg'}}", "grads": "{'weight': {'dp': 'avg'}}"}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """How the results of ranks are put together along each axis, in the words of DTensor.

    With ``"replicate"`` every rank has the same result, which is checked bit by bit. With
    ``"sum"``, ``"avg"``, ``"min"`` or ``"max"`` the whole is the sum, mean, minimum or maximum over
    the ranks; the last two are for metrics. An axis that is left out keeps its default. By default,
    the loss and the gradients of weight and bias are summed over dp and cp, metrics are summed or
    their extremum is taken over dp and cp, and all of these and the gradient of the hidden states
    are replicated over tp.

    The loss of every rank gets the same upstream gradient, as if a trainer called
    ``loss.backward()`` on each. Along an axis that splits a dim of an input, the parts of its
    gradient are concatenated. There ``"avg"`` also divides by the number of ranks, for kernels that
    leave this factor to the optimizer (Megatron-LM, FSDP).

    Raises:
        UsageError: if an axis or placement is unknown, or "min" or "max" is used for anything but a
            metric.
    """

    loss: Placements = field(default_factory=dict)
    """For the loss, by axis, such as ``{"dp": "avg"}``. By default ``{"dp": "sum", "cp": "sum",
    "tp": "replicate"}``."""
    logprobs: Placements = field(default_factory=dict)
    """For log-probabilities, and for entropies if the spec has them. By default dp and cp split
    them, and each tp rank has the same. A candidate that is given whole sequences may declare
    ``{"cp": "replicate"}`` and return whole sequences on every cp rank."""
    metrics: Mapping[str, Placements] = field(default_factory=dict)
    """By the name of the metric, such as ``{"entropy": {"dp": "avg"}}``. The default over dp and cp
    is what ``lossgate list SPEC`` says, and each tp rank has the same."""
    grads: Mapping[str, Placements] = field(default_factory=dict)
    """By the name of the input, such as ``{"weight": {"dp": "avg"}}``: "hidden", "weight", "bias",
    "logits", ... By default a gradient is summed over dp and cp, and the same on each tp rank,
    except along an axis that splits the input."""

    def __post_init__(self) -> None:
        given = arguments("Contract(", vars(self))
        _check(given["loss"])
        _check(given["logprobs"])
        for name, example in _EXAMPLES.items():
            given[name].instance(Mapping, f"placements by name, such as {example}")
            for _, placements in given[name].items():
                _check(placements)

    @property
    def whole_sequences(self) -> bool:
        """Whether every cp rank returns log-probabilities and entropies of whole sequences."""
        return self.logprobs.get("cp") == "replicate"

    def placements(self, output: Output, reduction: Literal["sum", "min", "max"] = "sum") -> Placements:
        """Returns by axis how the ranks' parts of an output are put together.

        Args:
            output: the output.
            reduction: the spec's reduction of a metric over the ranks that share the batch.
        """
        if output.kind == "loss":
            return {**_DEFAULT, **self.loss}
        if output.kind == "token value":
            return {"tp": "replicate", **self.logprobs}
        if output.kind == "gradient":
            return {**_DEFAULT, **self.grads.get(output.name, {})}
        return {"dp": reduction, "cp": reduction, "tp": "replicate", **self.metrics.get(output.name, {})}


def _check(given: Argument) -> None:
    """Checks the placements of one output."""
    given.instance(Mapping, "placements by axis, such as {'dp': 'sum'}")
    given.mapping("", AXES, "unknown mesh axis")
    for _, placement in given.items():
        placement.one_of(get_args(Placement))
        if placement.value in ("min", "max") and not given.name.startswith("metrics"):
            raise placement.error("only metrics may be combined this way")
