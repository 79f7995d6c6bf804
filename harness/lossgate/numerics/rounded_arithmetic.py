# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a rounded run: float64, in which each step rounds as the kernel declares."""

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
    """The format of the kernel's inputs."""
    gradients: FloatFormat
    """The format of the gradients that products give: that of inputs, or a coarser one of
    products."""
    logits: FloatFormat
    logsumexp: FloatFormat
    logprobs: FloatFormat
    entropy: FloatFormat
    dlogits: FloatFormat
    accumulate: FloatFormat
    accumulate_hidden: FloatFormat
    reduce_hidden: FloatFormat
    """The format of each tp rank's part of the hidden states' gradient, when kernel or caller adds
    the parts up."""
    loss: FloatFormat
    """The format of the loss's arithmetic."""
    returned: tuple[tuple[str, FloatFormat], ...]
    """The formats in which outputs and metrics are returned, by name; "" is for all other names."""
    products: FloatFormat
    """The format of the factors of products."""
    truncates: bool
    """Whether the partial sums of products are rounded toward zero."""
    vocab_chunk: int | None
    """Rows of the vocabulary per step of the hidden gradient's running sum; None for a single
    step."""
    chunk: int | None
    """Tokens per step of the weight gradient's running sum; None for a single step."""
    grads_in_forward: bool

    @property
    def rounded_chunk(self) -> int | None:
        """Number of tokens after which a running sum over tokens is rounded. None if it is rounded
        only at the end of a rank.
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
            noise: the source of rounding errors.
            members: the number of runs.
            stages: the formats to which the runs round.
            choices: the source of random numbers that all numbers of a run share, such as the
                choice between two ways to compute an entropy; by default ``noise``.
        """
        self.noise, self.members, self.stages = noise, members, stages
        self._choices = choices or noise

    def round(self, x: Tensor, to: FloatFormat = FLOAT32) -> Tensor:
        """Rounds numbers whose errors near zero cannot matter, such as logits and logarithms."""
        return self.noise.round(x, to, near_zero=False)

    def of_each(self, dims: int) -> Tensor:
        """Returns a random number in [-1, 1) for each member: ``[members, 1, ...]``, with ``dims``
        dims.
        """
        return self._choices.uniform(torch.Size((self.members,))).view(-1, *[1] * (dims - 1))

    def coins(self, dims: int) -> Tensor:
        """Returns a random bool for each member: ``[members, 1, ...]``, with ``dims`` dims."""
        return self.of_each(dims) > 0

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a product with the errors of float32 accumulation in any order.

        Args:
            left, right: matrices; or stacks of matrices ``[members or 1, rows, columns]``.
        """
        total = SumOfProducts(self)
        total.add(left, right)
        return total.rounded()

    def matmul_over_vocab(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a product like ``matmul``, with terms that may be far smaller than others.

        Terms below the spacing of the result do not round at random: those that come after the
        large ones are lost. Over a wide vocabulary they add up.

        Args:
            left: the gradient of the logits, ``[members, rows, vocab]``.
            right: rows of the weight, ``[vocab, columns]``.
        """
        found = self.matmul(left, right)
        of_term = torch.linalg.vector_norm(right, dim=-1) / right.shape[-1] ** 0.5
        of_row = found[0].square().mean(-1, keepdim=True).sqrt()
        small = left[0].masked_fill(left[0].abs() * of_term > FLOAT32.unit * of_row, 0.0)
        return found + (small @ right) * self.of_each(3)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns a product in float64."""
        return left @ right

    def squares_of_columns(self, x: Tensor) -> Tensor:
        """Returns the sum of squares of each column of matrices, ``[..., 1, columns]``."""
        return x.square().sum(-2, keepdim=True)

    def factor(self, x: Tensor) -> Tensor:
        """Returns a factor as products take it: rounded to their format, unless that is float32.

        A matrix without a dim of members is an input of the kernel. It is exact if the format of
        products is no coarser than that of inputs.
        """
        to, is_input = self.stages.products, x.dim() == 2
        if to == FLOAT32 or (is_input and to.unit <= self.stages.inputs.unit):
            return x
        return self.noise.round(x.expand(self.members, *x.shape) if is_input else x, to)

    def truncated(self, product: Tensor, terms: int, steps_of_each: Tensor) -> Tensor:
        """Returns a product whose partial sums were rounded toward zero.

        Tensor cores add some terms at a time, 4 to 16 as a rule (Fasi et al. 2021, Numerical
        behavior of NVIDIA tensor cores, section 4). A step loses up to two units roundoff of its
        partial sum, which is half the product on average. The number of steps differs from kernel
        to kernel, but is the same for all entries.

        Args:
            product: ``[members, *shape]``.
            terms: the number of terms that each entry adds up.
            steps_of_each: ``[members]`` numbers in [-1, 1); a larger one stands for more steps.
        """
        steps = terms / 4 + 1
        share = 0.5 + 0.5 * steps_of_each.view(-1, *[1] * (product.dim() - 1))
        return product * (1 - FLOAT32.unit * steps * share)

    def running_sum(self, parts: Sequence[Tensor], to: FloatFormat) -> Tensor:
        """Adds parts one after the other. Each part and each partial sum is rounded to a format."""
        total = None
        for part in parts:
            total = self.added(total, part, to)
        assert total is not None, "no parts"
        return total

    def added(self, total: Tensor | None, part: Tensor, to: FloatFormat) -> Tensor:
        """Adds a part to a running sum, which is None at first. Part and new sum are rounded
        to a format.
        """
        part = self.noise.round(part, to)
        return part if total is None else self.noise.round(total + part, to)


class SumOfProducts:
    """A product whose terms come in parts, but which rounds as if they came at once.

    K terms are added one by one, and each partial sum is rounded. The sum of the first k terms is
    about ``k / K`` of the result, plus terms that cancel later. The size of the latter follows from
    the norms of row and column. (Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1.)
    """

    def __init__(self, run: RoundedRun) -> None:
        """Begins with no terms.

        Args:
            run: the rounded runs that compute the product.
        """
        self._run, self._terms = run, 0
        self.exact = self._rows = self._columns = torch.zeros((), dtype=torch.float64)
        """``exact`` is the sum without rounding. The others are the sums of squares of each row of
        the left factor, and of each column of the right one."""

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds the terms of ``left @ right``.

        Args:
            left, right: as for ``RoundedRun.matmul``.
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
        """Returns the rounded product of all terms, ``[members, *shape]``, or some of its rows."""
        run, exact, of_rows = self._run, self.exact[..., rows, :], self._rows[..., rows, :]
        size = torch.addcmul(exact.square() * (self._terms / 3), of_rows, self._columns, value=0.5).sqrt_()
        of_one = exact.shape[1:] if exact.dim() > 2 else exact.shape
        noise = run.noise.uniform(torch.Size((run.members, *of_one)))
        rounded = torch.addcmul(exact, size, noise, value=FLOAT32.unit)
        return run.truncated(rounded, self._terms, self._steps_of_each) if run.stages.truncates else rounded

    @cached_property
    def _steps_of_each(self) -> Tensor:
        """The numbers of steps of the members, for all rows; see ``RoundedRun.truncated``."""
        return self._run.of_each(1)
