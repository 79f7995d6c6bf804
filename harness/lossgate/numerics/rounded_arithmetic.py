# SPDX-License-Identifier: Apache-2.0
"""What a rounded run of a kernel computes with: float64 arithmetic in which each step rounds as the
kernel declares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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

    @property
    def rounded_chunk(self) -> int | None:
        """Tokens after which a running sum over tokens is rounded; None for the end of a rank
        alone.
        """
        return self.chunk if self.accumulate != FLOAT32 else None

    def returned_in(self, name: str) -> FloatFormat:
        """Returns the format in which an output or metric is returned."""
        given = dict(self.returned)
        return given.get(name, given.get("", self.loss))


class RoundedRun:
    """Arithmetic of ``members`` rounded runs at once, along the first dim of every tensor."""

    def __init__(self, noise: Noise, members: int, stages: Stages, choices: Noise | None = None) -> None:
        """Prepares runs.

        Args:
            noise: the rounding errors.
            members: how many runs there are.
            stages: the formats to which they round.
            choices: of what is one for all numbers of a run; by default ``noise``.
        """
        self.noise, self.members, self.stages = noise, members, stages
        self._choices = choices or noise

    def round(self, x: Tensor, to: FloatFormat = FLOAT32) -> Tensor:
        """Rounds numbers that need no care near zero, such as logits and logarithms."""
        return self.noise.round(x, to, near_zero=False)

    def of_each(self, dims: int) -> Tensor:
        """Returns ``[members, 1, ...]`` random numbers in [-1, 1) of so many dims, one for each
        member.
        """
        return self._choices.uniform(torch.Size((self.members,))).view(-1, *[1] * (dims - 1))

    def coins(self, dims: int) -> Tensor:
        """Returns ``[members, 1, ...]`` bool of so many dims, one for each member."""
        return self.of_each(dims) > 0

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a product as float32 accumulation gives it, in any order.

        Args:
            left, right: matrices; or stacks of them, whose first dim is that of the members, or 1.
        """
        total = SumOfProducts(self)
        total.add(left, right)
        return total.rounded()

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a product in float64."""
        return left @ right

    def squares_of_columns(self, x: Tensor) -> Tensor:
        """Returns the sum of squares of each column of matrices, ``[..., 1, columns]``."""
        return x.square().sum(-2, keepdim=True)

    def factor(self, x: Tensor) -> Tensor:
        """Returns a factor as a product takes it."""
        to, inputs = self.stages.products, self.stages.inputs
        if to == FLOAT32 or (x.dim() == 2 and inputs.unit >= to.unit):  # the inputs of a kernel are exact in it
            return x
        of_each = x.expand(self.members, *x.shape) if x.dim() == 2 else x
        return self.noise.round(of_each, to)

    def truncated(self, product: Tensor, terms: int, steps_of_each: Tensor) -> Tensor:
        """Returns a product of so many terms whose partial sums were rounded toward zero.

        Tensor cores add some terms at a time, 4 to 16 as a rule (Fasi et al. 2021, Numerical
        behavior of NVIDIA tensor cores, section 4). A step loses up to two units roundoff of its
        partial sum, which is half the product on average. How many steps there are differs from
        kernel to kernel, and not from entry to entry: ``steps_of_each`` says it, ``[members]``
        numbers in [-1, 1).
        """
        steps = terms / 4 + 1
        share = 0.5 + 0.5 * steps_of_each.view(-1, *[1] * (product.dim() - 1))
        return product * (1 - FLOAT32.unit * steps * share)

    def running_sum(self, parts: Sequence[Tensor], to: FloatFormat) -> Tensor:
        """Adds parts one after the other, each of them and each partial sum rounded to a format."""
        total = None
        for part in parts:
            total = self.added(total, part, to)
        assert total is not None, "no parts"
        return total

    def added(self, total: Tensor | None, part: Tensor, to: FloatFormat) -> Tensor:
        """Returns a running sum, None if nothing is in it yet, with a part: both rounded."""
        part = self.noise.round(part, to)
        return part if total is None else self.noise.round(total + part, to)


class SumOfProducts:
    """A product whose terms come part by part, and that rounds as one.

    Added one by one, K terms make partial sums of about ``k / K`` of the result, plus what cancels
    later, whose size is that of the norms of row and column; each is rounded. (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1.)
    """

    def __init__(self, run: RoundedRun) -> None:
        """Begins with no terms.

        Args:
            run: whose product it is.
        """
        self._run, self._terms = run, 0
        self.exact = self._rows = self._columns = torch.zeros((), dtype=torch.float64)
        """``exact`` is the sum without rounding."""

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds the terms of ``left @ right``.

        Args:
            left, right: matrices; or stacks of them, whose first dim is that of the members, or 1.
        """
        left, right = self._run.factor(left), self._run.factor(right)
        if not self._terms:
            self.exact = self._run.product(left, right)
        else:  # in place: the sum may be as large as the lm-head
            self.exact.baddbmm_(left, right.expand(len(left), *right.shape[-2:]))
        self._rows = self._rows + left.square().sum(-1, keepdim=True)
        self._columns = self._columns + self._run.squares_of_columns(right)
        self._terms += right.shape[-2]

    def rounded(self, rows: slice = slice(None)) -> Tensor:
        """Returns the product of all terms, ``[members, *shape]``, or some of its rows."""
        run, exact, of_rows = self._run, self.exact[..., rows, :], self._rows[..., rows, :]
        size = torch.addcmul(exact.square() * (self._terms / 3), of_rows, self._columns, value=0.5).sqrt_()
        of_one = exact.shape[1:] if exact.dim() > 2 else exact.shape
        noise = run.noise.uniform(torch.Size((run.members, *of_one)))
        rounded = torch.addcmul(exact, size, noise, value=FLOAT32.unit)
        return run.truncated(rounded, self._terms, self._steps_of_each) if run.stages.truncates else rounded

    @cached_property
    def _steps_of_each(self) -> Tensor:
        """How many steps each member makes, for all rows; see ``RoundedRun.truncated``."""
        return self._run.of_each(1)
