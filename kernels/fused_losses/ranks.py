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
    if group is None or group.size() == 1:
        return x
    return _SumOver.apply(x, group)  # type: ignore[return-value]


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None
