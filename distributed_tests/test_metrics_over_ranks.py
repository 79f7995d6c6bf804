# SPDX-License-Identifier: Apache-2.0
"""Metrics over real process groups: one collective for each group, whatever is in them."""

import pytest
import torch

from distributed_tests.wrappers.step import collectives_called
from fused_losses import Metrics
from lossgate import all_ranks_assert
from lossgate.worlds import RankContext


def of_rank(rank: int) -> Metrics:
    """Rank 0 has no token."""
    low, high = (torch.inf, -torch.inf) if rank == 0 else (float(-rank), float(rank))
    values = {"tokens": float(rank), "loss": rank * 2.0, "low": low, "high": high}
    return Metrics(values, minima=["low"], maxima=["high"], means={"loss": "tokens"})


WHOLE = {
    "dp": {0: (2, 2, -2, 2), 1: (4, 2, -3, 3)},
    "both": {0: (6, 2, -3, 3), 1: (6, 2, -3, 3)},
}
"""By the groups: tokens, loss, lowest and highest of each cp rank."""


@pytest.mark.world(dp=2, cp=2)
@pytest.mark.parametrize("groups", WHOLE)
def test_one_collective_for_each_group(rank_context: RankContext, groups: str) -> None:
    dp, cp = rank_context.mesh.get_group("dp"), rank_context.mesh.get_group("cp")
    own, before = sum([of_rank(rank_context.rank), of_rank(0)], Metrics()), collectives_called()
    whole = own.reduce(dp, cp if groups == "both" else None)
    called = collectives_called() - before
    expected = dict(zip(("tokens", "loss", "low", "high"), WHOLE[groups][cp.rank()], strict=True))
    all_ranks_assert(whole.floats() == expected, f"{whole}")
    all_ranks_assert(called == (2 if groups == "both" else 1), f"{called} collectives")


@pytest.mark.world(dp=2)
def test_ranks_with_other_metrics_all_raise(rank_context: RankContext) -> None:
    own = of_rank(1) if rank_context.rank else Metrics()
    with pytest.raises(ValueError, match="metrics of rank 1: expected those of rank 0"):
        own.reduce(rank_context.mesh.get_group("dp"))
