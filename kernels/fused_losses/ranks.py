# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks that gradients flow through."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over(group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    """The sum of every rank's ``x``, on every rank: one all-reduce. ``x`` itself without a group, or alone in it.

    For a loss that every rank of ``group`` computes whole, from sums to which each contributes: the gradient of a rank's own
    ``x`` is then that of the sum as it is. (Adding it up over ranks, as ``torch.distributed.nn`` does, makes it too
    large by their number.)
    """
    return x if alone(group) else _SumOver.apply(x, group, False)  # type: ignore[return-value]


def sum_over_for_parts(group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    """The same for a loss of which every rank computes a part: backward adds the gradients of the parts up, by one all-reduce more."""
    return x if alone(group) else _SumOver.apply(x, group, True)  # type: ignore[return-value]


def alone(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank tells what every rank of ``group`` knows whole, so that a sum over them counts it once."""
    return group is None or group.rank() == 0


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, parts: bool) -> Tensor:
        ctx.group, ctx.parts = group, parts
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (_summed(upstream, ctx.group) if ctx.parts else upstream), None, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
