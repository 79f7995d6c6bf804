# SPDX-License-Identifier: Apache-2.0
"""The outputs of kernels that are compared: loss, values per token, metrics, and the gradient of
each differentiable input.
"""

from dataclasses import dataclass
from typing import Literal

from lossgate.problems.partition import Dims

Kind = Literal["loss", "token value", "metric", "gradient"]


@dataclass(frozen=True)
class Output:
    """One tensor that a candidate gives back, or whose gradient it gives."""

    kind: Kind
    name: str
    """The name in ``lossgate.Outputs``: "loss", "logprobs", "token_entropy" or that of a metric.
    For a gradient, the name of the input."""
    dims: Dims = ()

    def __str__(self) -> str:
        return f"grad of {self.name}" if self.kind == "gradient" else self.name


LOSS = Output("loss", "loss")
LOGPROBS = Output("token value", "logprobs", ("token",))
TOKEN_ENTROPY = Output("token value", "token_entropy", ("token",))

RETURNED = {output.name: output for output in (LOSS, LOGPROBS, TOKEN_ENTROPY)}
"""The outputs that a candidate may return, without metrics, by their name in
``lossgate.Outputs``."""


def metric_output(name: str) -> Output:
    return Output("metric", name)


def gradient_output(leaf: str, dims: Dims) -> Output:
    """Returns the output for the gradient of a differentiable input, which has the same dims."""
    return Output("gradient", leaf, dims)


Reduction = Literal["sum", "min", "max"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A scalar that a candidate may return.

    Args:
        meaning: what it is, for people.
        reduction: how the parts of ranks that share a batch are combined: "sum", "min" or "max". A
            mean is a sum that is already divided by a count of the whole batch.
    """

    meaning: str
    reduction: Reduction = "sum"
