# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks with the right gradient."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over(group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    """Sums ``x`` over ranks, for a loss that every rank of the group computes in full.

    Each rank's contribution enters the same loss once, so the gradient of a rank's own ``x`` is
    the gradient of the sum, unchanged. ``torch.distributed.nn`` adds that gradient up over ranks,
    which makes it too large by their number.

    Args:
        group: the ranks to sum over; None for this rank alone.
        x: this rank's contribution, of any shape, the same on every rank.

    Returns:
        The sum, on every rank; ``x`` itself without a group or in a group of one rank.

    Collectives:
        One all-reduce SUM of ``x`` in forward; none in backward.
    """
    return x if alone(group) else _SumOver.apply(x, group, False)  # type: ignore[return-value]


def sum_over_for_parts(group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    """Sums ``x`` over ranks, for a loss of which every rank computes its own part.

    Each part depends on every rank's ``x``, so backward adds up the gradients of the parts.

    Args:
        group: the ranks to sum over; None for this rank alone.
        x: this rank's contribution, of any shape, the same on every rank.

    Returns:
        The sum, on every rank; ``x`` itself without a group or in a group of one rank.

    Collectives:
        One all-reduce SUM of ``x`` in forward, and one in backward.
    """
    return x if alone(group) else _SumOver.apply(x, group, True)  # type: ignore[return-value]


def alone(group: dist.ProcessGroup | None) -> bool:
    """Returns whether this rank has no other rank to communicate with in ``group``."""
    return group is None or group.size() == 1


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Returns whether this rank is the first of ``group``; always true without a group.

    If every rank of the group holds a number in full, only the first rank reports it, so that a sum
    over ranks counts it once.
    """
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
