# SPDX-License-Identifier: Apache-2.0
"""A rank that raises or uses another rank's group is named, and ends the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossgate.worlds import RankContext
from lossgate.worlds.base import CollectiveMisuse, RankRaised

from .on_ranks import MakeWorld, failure_of, of_rank


def test_a_raising_rank_is_named(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 1:
            raise ValueError("no such thing")
        dist.barrier()

    world = make_world("tp=3")
    message = failure_of(world, body, RankRaised)
    assert message.startswith("rank 1 raised ValueError: no such thing  [")
    assert f"{Path(__file__).name}:" in message
    with pytest.raises(RankRaised) as error:
        world.run(body)
    assert error.value.rank == 1
    assert isinstance(error.value.__cause__, ValueError)


def test_a_failure_can_not_be_swallowed_by_other_ranks(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank == 1:
            raise ValueError("first")
        try:
            dist.barrier()
        except Exception as error:  # a kernel that catches too much
            raise RuntimeError("second") from error

    assert "rank 1 raised ValueError: first" in failure_of(make_world("tp=2"), body, RankRaised)


def test_use_of_another_ranks_group(make_world: MakeWorld) -> None:
    world, cache = make_world("tp=2"), dict[str, Any]()

    def body(context: RankContext) -> None:
        dist.all_reduce(torch.ones(1), group=cache.setdefault("tp", context.mesh.get_group("tp")))

    message = failure_of(world, body, CollectiveMisuse)
    assert (
        "rank 1 called all_reduce on the group object of rank 0 (tp[0, 1]): the object leaked from one rank to another"
        in message
    )
    with pytest.raises(CollectiveMisuse, match="was called outside of its world's run"):
        dist.all_reduce(torch.ones(1), group=cache["tp"])


def test_groups_made_by_some_ranks_of_a_failed_run_do_no_harm(make_world: MakeWorld) -> None:
    world = make_world("tp=2")

    def body(context: RankContext, fail: bool) -> float:
        if fail and context.rank == 1:
            raise ValueError
        x = of_rank(context.rank, 1)
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        return x.item()

    with pytest.raises(RankRaised):
        world.run(lambda context: body(context, fail=True))
    assert world.run(lambda context: body(context, fail=False)) == [1, 1]
