# SPDX-License-Identifier: Apache-2.0
"""What a rounded run of a kernel computes with: float64 arithmetic in which each step rounds as the
kernel declares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.numerics.float_formats import FLOAT32, FloatFormat
from lossgate.numerics.noise import Noise


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The format to which a kernel rounds at each stage; see ``declaration.precision``."""

    inputs: FloatFormat
    """The format of the kernel's inputs, and so of its gradients."""
    logits: FloatFormat
    logsumexp: FloatFormat
    logprobs: FloatFormat
    dlogits: FloatFormat
    accumulate: FloatFormat
    reduce_hidden: FloatFormat
    """The format of the parts of the hidden states' gradient that are added up over tp, by kernel
    or caller."""
    loss: FloatFormat
    chunk: int | None
    """Tokens per step of the weight gradient's running sum; None for a single step."""
    grads_in_forward: bool


class RoundedRun:
    """Arithmetic of ``members`` rounded runs at once, along the first dim of every tensor."""

    def __init__(self, noise: Noise, members: int, stages: Stages) -> None:
        self.noise, self.members, self.stages = noise, members, stages

    def round(self, x: Tensor, to: FloatFormat = FLOAT32) -> Tensor:
        """Rounds numbers that need no care near zero, such as logits and logarithms."""
        return self.noise.round(x, to, near_zero=False)

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a product as float32 accumulation gives it, in any order.

        Added one by one, K terms make partial sums of about ``k / K`` of the result, plus what
        cancels later, whose size is that of the norms of row and column; each is rounded. (Higham,
        Accuracy and Stability of Numerical Algorithms, section 3.1.)
        """
        product, terms = left @ right, right.shape[-2]
        norms = left.square().sum(-1, keepdim=True) * right.square().sum(-2, keepdim=True)
        size = torch.add(norms / 2, product.square(), alpha=terms / 3).sqrt_()
        noise = self.noise.uniform(torch.Size((self.members, *product.shape[-2:])))
        return torch.addcmul(product, size, noise, value=FLOAT32.unit)

    def running_sum(self, parts: Sequence[Tensor], to: FloatFormat) -> Tensor:
        """Adds parts one after the other, each of them and each partial sum rounded to a format."""
        total = self.noise.round(parts[0], to)
        for part in parts[1:]:
            total = self.noise.round(total + self.noise.round(part, to), to)
        return total
