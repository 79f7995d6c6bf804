# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait for one another for ever are an error at once."""

from pathlib import Path

import torch
import torch.distributed as dist

from lossgate.worlds import RankContext
from lossgate.worlds.base import Deadlock

from .on_ranks import MakeWorld, failure_of


def test_a_missing_call_is_a_deadlock(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        if context.rank != 2:
            dist.all_reduce(torch.ones(5), group=context.mesh.get_group("tp"))

    message = failure_of(make_world("tp=3", timeout=1e9), body, Deadlock)  # found at once, or never
    assert "rank 0: in all_reduce(SUM, [float32[5]]) #0 on tp[0, 1, 2], waits for ranks [2]" in message
    assert "rank 2: has returned" in message
    assert f"{Path(__file__).name}:" in message


def test_calls_in_another_order_are_a_deadlock(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        groups = [context.mesh.get_group("tp"), dist.new_group([0, 1])]
        for group in reversed(groups) if context.rank else groups:
            dist.all_reduce(torch.ones(1), group=group)

    assert "rank 1: in all_reduce" in failure_of(make_world("tp=2"), body, Deadlock)
