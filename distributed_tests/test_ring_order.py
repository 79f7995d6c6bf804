# SPDX-License-Identifier: Apache-2.0
"""The simulated world with the order ``ring`` gives what gloo gives, bit for bit."""

from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.base.layout import Layout
from lossgate.worlds import RankContext, make_world

SIZES = 12


def sums(context: RankContext, dtype: torch.dtype, sizes: list[int]) -> list[Tensor]:
    """Returns, for each size, what all_reduce and reduce_scatter make of the ranks' parts."""
    found: list[Tensor] = []
    ranks = context.layout.ranks
    for size in sizes:
        generator = torch.Generator().manual_seed(1000 * context.rank + size)
        part = torch.randn(size * ranks, generator=generator).to(dtype)
        own = torch.empty(size, dtype=dtype)
        dist.reduce_scatter_tensor(own, part)
        dist.all_reduce(part[:size])
        found += [own, part[:size]]
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ring_is_gloo_bit_for_bit(ranks: int, dtype: torch.dtype) -> None:
    chance = Random(f"{ranks} {dtype}")
    sizes = [1, 2, 3, *(chance.randrange(4, 5000) for _ in range(SIZES))]

    def task(context: RankContext) -> list[Tensor]:
        return sums(context, dtype, sizes)

    by_gloo = make_world("gloo", Layout(tp=ranks)).run(task)
    simulated = make_world("simulated", Layout(tp=ranks))
    by_ring, by_rank = (simulated.run(task, order=order) for order in ("ring", "rank"))
    simulated.close()
    for rank, (ours, theirs) in enumerate(zip(by_ring, by_gloo, strict=True)):
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(our, their), (rank, sizes[number // 2], "all_reduce" if number % 2 else "reduce_scatter")
    if ranks > 2:  # the check can fail: another order gives other bits
        assert any(not torch.equal(a, b) for a, b in zip(by_rank[0], by_gloo[0], strict=True))
