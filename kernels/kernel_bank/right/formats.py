# SPDX-License-Identifier: Apache-2.0
"""Where a kernel rounds: the dtypes in which it multiplies, computes the softmax, and the loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lossgate.base.names import DTYPES
from lossgate.declaration.precision import Precision

INPUTS = "inputs"
"""In place of a dtype: that of the kernel's inputs."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The dtype of each stage of a kernel, by name; ``INPUTS`` for that of its inputs."""

    name: str
    product: str = "float32"
    """Of the leaves, before they are multiplied, and so of the logits."""
    logits: str | None = None
    """To which logits are rounded after the product, and their gradients on the way back, though
    both go on in the dtype of the softmax; None for not at all."""
    softmax: str = "float32"
    """Of logits and log-probabilities, from the temperature on."""
    loss: str = "float32"
    """Of log-probabilities and of the fields of the batch, as they enter the loss."""

    def to_product(self, leaf: Tensor) -> Tensor:
        return _to(leaf, self.product)

    def to_softmax(self, logits: Tensor, inputs: torch.dtype) -> Tensor:
        rounded = logits if self.logits is None else logits.to(_dtype(self.logits, inputs))
        return rounded.to(_dtype(self.softmax, inputs))

    def to_loss(self, value: Tensor, inputs: torch.dtype) -> Tensor:
        """Returns a value in the dtype of the loss; ids and masks stay what they are."""
        return value.to(_dtype(self.loss, inputs)) if value.is_floating_point() else value

    def to_output(self, value: Tensor) -> Tensor:
        """Returns what a kernel returns: float64 is no dtype of a training run."""
        return value.float() if value.dtype is torch.float64 else value

    def precision(self, changes: Mapping[str, str | int | bool]) -> Mapping[str, Precision]:
        """Returns what a kernel of these formats declares, for each dtype of its inputs.

        Args:
            changes: other fields of ``Precision``; ``INPUTS`` stands for the dtype of the inputs.
        """
        return {dtype: self._precision(dtype, changes) for dtype in DTYPES}

    def _precision(self, dtype: str, changes: Mapping[str, str | int | bool]) -> Precision:
        stages = (self.product, self.logits or self.product, self.softmax, self.loss)
        declares = {INPUTS: dtype, "float64": "float32"}
        product, logits, softmax, loss = (declares.get(one, one) for one in stages)
        declared = Precision(
            logits=logits,
            dlogits=logits,
            reduce=product,
            logsumexp=softmax,
            logprobs=softmax,
            entropy=softmax,
            loss=loss,
        )
        own = {name: dtype if value == INPUTS else value for name, value in changes.items()}
        return replace(declared, **own)  # pyright: ignore[reportArgumentType]


def _dtype(name: str, inputs: torch.dtype) -> torch.dtype:
    return inputs if name == INPUTS else getattr(torch, name)


def _to(tensor: Tensor, name: str) -> Tensor:
    return tensor.to(_dtype(name, tensor.dtype))


FINE = Formats(name="float32")
"""Everything in float32."""
DOUBLE = Formats(name="float64", product="float64", softmax="float64", loss="float64")
"""Everything in float64: more exact than what is declared, which is float32."""
TRAINED = Formats(name="trained", product=INPUTS)
"""Matrix products in the inputs' dtype, then float32: what most trainers do."""
LOW_LOSS = Formats(name="low_loss", product=INPUTS, loss=INPUTS)
"""The softmax in float32; log-probabilities and fields are cast where they enter the loss."""
COARSE_LOGITS = Formats(name="coarse_logits", logits="bfloat16")
"""Logits in bfloat16, whatever the inputs."""
COARSE_LOSS = Formats(name="coarse_loss", loss="bfloat16")
"""The loss in bfloat16, whatever the inputs."""
LOW = Formats(name="low", product=INPUTS, softmax=INPUTS, loss=INPUTS)
"""Everything in the inputs' dtype, as under no autocast."""
