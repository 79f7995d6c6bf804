# SPDX-License-Identifier: Apache-2.0
"""Collectives that run in backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lossgate.worlds import RankContext

from .on_ranks import MakeWorld, of_rank


@pytest.mark.parametrize("asynchronous", [False, True])
def test_collectives_in_backward(make_world: MakeWorld, asynchronous: bool) -> None:
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            total = upstream.clone()
            work = dist.all_reduce(total, async_op=asynchronous)
            if work is not None:
                work.wait()
            return total * 2

    def body(context: RankContext) -> float:
        x = torch.ones(1, requires_grad=True)
        (Sum.apply(x) * (context.rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    assert make_world("tp=3").run(body) == [12, 12, 12]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_a_collective(make_world: MakeWorld, reentrant: bool) -> None:
    def body(context: RankContext) -> float:
        def scaled(x: Tensor) -> Tensor:
            factor = of_rank(context.rank, 1)
            dist.all_reduce(factor)
            return x * factor

        x = torch.ones(1, requires_grad=True)
        checkpoint(scaled, x, use_reentrant=reentrant).sum().backward()
        assert x.grad is not None
        return x.grad.item()

    assert make_world("tp=3").run(body) == [3, 3, 3]
