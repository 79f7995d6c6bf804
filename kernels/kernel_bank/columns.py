# SPDX-License-Identifier: Apache-2.0
"""Reductions over the vocabulary, of which a rank of tp holds some columns.

The kernels of the bank that are parallel over the vocabulary share them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllReduce(torch.autograd.Function):
    """Sums over tp. What follows is the same on every rank, so each takes the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Spread(torch.autograd.Function):
    """Uses a number of every rank in each rank's columns: their gradients are summed over tp."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True)
class Columns:
    """Reductions over the vocabulary, of which a rank holds some columns."""

    start: int
    end: int
    vocab: int
    group: dist.ProcessGroup | None

    def sum(self, x: Tensor) -> Tensor:
        """Sums ``[tokens, columns]`` over the whole vocabulary, ``[tokens]``."""
        return self._reduced(x.sum(-1))

    def mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.vocab

    def largest(self, x: Tensor) -> Tensor:
        """Returns the largest entry of each token ``[tokens]``, without a gradient."""
        top = x.new_full(x.shape[:1], -torch.inf) if not x.shape[1] else x.detach().amax(-1)
        if self.group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        return top

    def logsumexp(self, x: Tensor) -> Tensor:
        top = self.largest(x)
        return top + self.sum((x - top[:, None]).exp()).log()

    def log_softmax(self, x: Tensor) -> Tensor:
        """Returns log-probabilities of this rank's columns."""
        lse = self.logsumexp(x)
        return x - self.spread(lse)[:, None]

    def spread(self, whole: Tensor) -> Tensor:
        """Returns what is the same on every rank, for use in each rank's columns."""
        return whole if self.group is None else _Spread.apply(whole, self.group)  # pyright: ignore[reportReturnType]

    def pick(self, x: Tensor, ids: Tensor) -> Tensor:
        """Returns the entries at ids of the whole vocabulary, ``[tokens]``."""
        own = (ids >= self.start) & (ids < self.end)
        if not x.shape[1]:
            return self._reduced(x.sum(-1))
        here = x.gather(1, torch.where(own, ids - self.start, 0)[:, None]).squeeze(1)
        return self._reduced(torch.where(own, here, 0.0))

    def _reduced(self, part: Tensor) -> Tensor:
        return part if self.group is None else _AllReduce.apply(part, self.group)  # pyright: ignore[reportReturnType]
