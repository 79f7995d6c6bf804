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
    entropy: FloatFormat
    dlogits: FloatFormat
    accumulate: FloatFormat
    accumulate_hidden: FloatFormat
    reduce_hidden: FloatFormat
    """The format of the parts of the hidden states' gradient that are added up over tp, by kernel
    or caller."""
    loss: FloatFormat
    returned: tuple[tuple[str, FloatFormat], ...]
    """The formats in which outputs and metrics are returned, by name; "" is for all others."""
    products: FloatFormat
    """The format of the factors of products."""
    truncates: bool
    """Whether what products add up is rounded toward zero."""
    vocab_chunk: int | None
    """Rows of the vocabulary per step of the hidden gradient's running sum; None for a single
    step."""
    chunk: int | None
    """Tokens per step of the weight gradient's running sum; None for a single step."""
    grads_in_forward: bool

    def returned_in(self, name: str) -> FloatFormat:
        """Returns the format in which an output or metric is returned."""
        given = dict(self.returned)
        return given.get(name, given.get("", self.loss))


class RoundedRun:
    """Arithmetic of ``members`` rounded runs at once, along the first dim of every tensor."""

    def __init__(self, noise: Noise, members: int, stages: Stages) -> None:
        self.noise, self.members, self.stages = noise, members, stages

    def round(self, x: Tensor, to: FloatFormat = FLOAT32) -> Tensor:
        """Rounds numbers that need no care near zero, such as logits and logarithms."""
        return self.noise.round(x, to, near_zero=False)

    def coins(self, dims: int) -> Tensor:
        """Returns ``[members, 1, ...]`` bool of so many dims, one for each member."""
        return self.noise.uniform(torch.Size((self.members,))).view(-1, *[1] * (dims - 1)) > 0

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a product as float32 accumulation gives it, in any order.

        Added one by one, K terms make partial sums of about ``k / K`` of the result, plus what
        cancels later, whose size is that of the norms of row and column; each is rounded. (Higham,
        Accuracy and Stability of Numerical Algorithms, section 3.1.)

        Args:
            left, right: matrices; or stacks of them, whose first dim is that of the members, or 1.
        """
        left, right = self._factor(left), self._factor(right)
        product, terms = left @ right, right.shape[-2]
        norms = left.square().sum(-1, keepdim=True) * right.square().sum(-2, keepdim=True)
        size = torch.add(norms / 2, product.square(), alpha=terms / 3).sqrt_()
        of_one = product.shape[1:] if product.dim() > 2 else product.shape
        noise = self.noise.uniform(torch.Size((self.members, *of_one)))
        rounded = torch.addcmul(product, size, noise, value=FLOAT32.unit)
        return self._truncated(rounded, terms) if self.stages.truncates else rounded

    def _factor(self, x: Tensor) -> Tensor:
        """Returns a factor as a product takes it."""
        to, inputs = self.stages.products, self.stages.inputs
        if to == FLOAT32 or (x.dim() == 2 and inputs.unit >= to.unit):  # the inputs of a kernel are exact in it
            return x
        of_each = x.expand(self.members, *x.shape) if x.dim() == 2 else x
        return self.noise.round(of_each, to)

    def _truncated(self, product: Tensor, terms: int) -> Tensor:
        """Returns a product of so many terms whose partial sums were rounded toward zero.

        Tensor cores add some terms at a time, 4 to 16 as a rule (Fasi et al. 2021, Numerical
        behavior of NVIDIA tensor cores, section 4). A step loses up to two units roundoff of its
        partial sum, which is half the product on average. How many steps there are differs from
        kernel to kernel, and not from entry to entry.
        """
        steps = terms / 4 + 1
        share = 0.5 + 0.5 * self.noise.uniform(torch.Size((self.members,)))
        lost = FLOAT32.unit * steps * share
        return product * (1 - lost.view(-1, *[1] * (product.dim() - 1)))

    def running_sum(self, parts: Sequence[Tensor], to: FloatFormat) -> Tensor:
        """Adds parts one after the other, each of them and each partial sum rounded to a format."""
        total = self.noise.round(parts[0], to)
        for part in parts[1:]:
            total = self.noise.round(total + self.noise.round(part, to), to)
        return total
