# SPDX-License-Identifier: Apache-2.0
"""Tests that run on ranks, as users write them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lossgate import all_ranks_assert
from lossgate.pytest_plugin.on_ranks import Ended, _end_as
from lossgate.worlds import RankContext


@pytest.mark.world(tp=2, cp=2)
def test_groups_are_those_of_the_layout(rank_context: RankContext) -> None:
    total = torch.tensor(float(rank_context.rank))
    dist.all_reduce(total, group=rank_context.mesh.get_group("cp"))
    all_ranks_assert(total == 2 + 2 * (rank_context.rank % 2), f"the sum is {total}")


@pytest.mark.world(tp=2)
@pytest.mark.parametrize("number", [1, 2])
def test_arguments_reach_the_ranks(rank_context: RankContext, number: int, tmp_path: Path) -> None:
    (tmp_path / f"{number}-{rank_context.rank}").touch()
    dist.barrier()
    all_ranks_assert(len([*tmp_path.iterdir()]) == 2)


@pytest.mark.world(dp=2, on="simulated")
def test_the_marker_may_name_a_world(rank_context: RankContext) -> None:
    all_ranks_assert(dist.get_backend() == "simulated")


class TestInAClass:
    @pytest.mark.world(dp=2)
    def test_method(self, rank_context: RankContext) -> None:
        all_ranks_assert(dist.get_world_size() == 2)


@pytest.mark.world(tp=2)
def test_a_test_may_skip_itself(rank_context: RankContext) -> None:
    pytest.skip("for the sake of this test")


@pytest.mark.world(tp=2)
@pytest.mark.parametrize("outcome", [pytest.xfail])
def test_a_test_may_say_that_it_fails(rank_context: RankContext, outcome: Callable[[str], None]) -> None:
    outcome("for the sake of this test")


def test_ranks_that_end_otherwise_fail_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match="did not end alike: ranks 0, 2 passed; rank 1 skipped"):
        _end_as([Ended("passed"), Ended("skipped", "no GPU"), Ended("passed")])
