# SPDX-License-Identifier: Apache-2.0
"""What the tests of the simulated world share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.worlds import RankContext, SimulatedWorld
from lossgate.worlds.base import RankFailure

MakeWorld = Callable[..., SimulatedWorld]
"""The type of the fixture ``make_world``."""


def of_rank(rank: int, *shape: int) -> Tensor:
    """Returns a tensor filled with the number of the rank."""
    return torch.full(shape, float(rank))


def healthy(world: SimulatedWorld) -> bool:
    """Returns whether the world runs an all_reduce over all ranks and each gets the sum."""

    def total(context: RankContext) -> float:
        x = of_rank(context.rank, 1)
        dist.all_reduce(x)
        return x.item()

    ranks = world.layout.ranks
    return world.run(total) == [ranks * (ranks - 1) / 2] * ranks


def failure_of(world: SimulatedWorld, body: Callable[[RankContext], Any], kind: type[RankFailure]) -> str:
    """Checks that a run of the body fails, and that the world is healthy before and after.

    Args:
        world: the world to run in.
        body: a body that fails on at least one rank.
        kind: the expected class of the failure.

    Returns:
        The message of the failure.
    """
    assert healthy(world)
    with pytest.raises(kind) as error:
        world.run(body)
    assert healthy(world)
    return str(error.value)
