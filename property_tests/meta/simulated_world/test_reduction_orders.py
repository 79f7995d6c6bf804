# SPDX-License-Identifier: Apache-2.0
"""The order in which reductions add: equal on all ranks, and different in rounding."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.problems.problem import ReductionOrder
from lossgate.worlds import RankContext
from lossgate.worlds.base import RankFailure

from .on_ranks import MakeWorld


@pytest.mark.parametrize("order", ["rank", "permuted", "tree", "ring"])
def test_parallel_groups_add_in_the_same_order(make_world: MakeWorld, order: ReductionOrder) -> None:
    """The sums that tp ranks compute over their own cp groups are equal, bit for bit."""

    def body(context: RankContext) -> list[Tensor]:
        cp, tp = context.mesh.get_group("cp"), context.mesh.get_group("tp")
        sums = []
        for call in range(5):
            if tp.rank() == call % 2:  # a call of one tp rank alone between the reductions
                dist.all_reduce(torch.ones(1), group=context.mesh.get_group("dp"))
            x = 0.1 * torch.randn(40, generator=torch.Generator().manual_seed(10 * call + cp.rank()))
            dist.all_reduce(x, group=cp)
            sums.append(x)
        return sums

    for seed in range(5):
        first, *others = make_world("cp=5,tp=2").run(body, order=order, seed=seed)
        assert all(torch.equal(torch.stack(first), torch.stack(other)) for other in others)


@pytest.mark.parametrize("order", ["rank", "permuted", "tree", "ring"])
def test_orders_agree_up_to_rounding_and_differ_in_it(make_world: MakeWorld, order: ReductionOrder) -> None:
    numbers = torch.randn(7, 501, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    world = make_world("tp=7")

    def body(context: RankContext) -> Tensor:
        x = numbers[context.rank].float()
        dist.all_reduce(x)
        return x

    results = world.run(body, order=order, seed=1)
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0].double() - numbers.sum(0)).abs().max() < 1e-5
    differs = order != "rank"
    assert differs == (not torch.equal(results[0], world.run(body, order="rank")[0]))


def test_the_permutation_depends_on_the_seed(make_world: MakeWorld) -> None:
    world = make_world("tp=8")

    def body(context: RankContext) -> Tensor:
        x = torch.randn(100, generator=torch.Generator().manual_seed(context.rank))
        dist.all_reduce(x)
        return x

    one, again, other = (world.run(body, order="permuted", seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_reduction_that_can_not_be_simulated(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        op: Any = dist._make_nccl_premul_sum(2.0)  # torch's stubs allow the simple ops only
        dist.all_reduce(torch.ones(1), op=op)

    with pytest.raises(RankFailure, match="PREMUL_SUM can't be simulated; use SUM"):
        make_world("tp=2").run(body)
