# SPDX-License-Identifier: Apache-2.0
# Kernels use the older names of collectives too.
# pyright: reportDeprecated=false
"""Calls that do not match, between ranks or within one, are errors that show both sides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossgate.worlds import RankContext
from lossgate.worlds.base import CollectiveMismatch

from .on_ranks import MakeWorld, failure_of


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (
            lambda r: dist.all_reduce(torch.ones(2 + r)),
            ("all_reduce(SUM, [float32[2]])", "all_reduce(SUM, [float32[3]])"),
        ),
        (lambda r: dist.all_reduce(torch.ones(2, 1) if r else torch.ones(2)), ("float32[2]", "float32[2, 1]")),
        (
            lambda r: dist.all_reduce(torch.ones(1, dtype=torch.bfloat16 if r else torch.float32)),
            ("float32[1]", "bfloat16[1]"),
        ),
        (
            lambda r: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX if r else dist.ReduceOp.SUM),
            ("all_reduce(SUM", "all_reduce(MAX"),
        ),
        (
            lambda r: dist.broadcast(torch.ones(1), src=0) if r else dist.all_reduce(torch.ones(1)),
            ("all_reduce(SUM", "broadcast(src=0"),
        ),
        (lambda r: dist.broadcast(torch.ones(1), src=r), ("broadcast(src=0", "broadcast(src=1")),
        (lambda r: dist.barrier() if r else dist.all_reduce(torch.ones(1)), ("all_reduce(SUM", "barrier()")),
    ],
)
def test_mismatched_collectives(make_world: MakeWorld, call: Callable[[int], Any], shown: tuple[str, str]) -> None:
    message = failure_of(make_world("tp=2"), lambda context: call(context.rank), CollectiveMismatch)
    lines = message.splitlines()
    assert lines[0] == "collective mismatch on world[0, 1] at call #0:"
    for rank, line in enumerate(lines[1:]):
        assert line.startswith(f"  rank {rank}: {shown[rank]}") or shown[rank] in line
        assert f"{Path(__file__).name}:" in line  # the call site


def test_splits_that_do_not_fit(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        dist.all_to_all_single(torch.empty(2), torch.ones(2), [1, 1], [2, 0] if context.rank else [1, 1])

    assert "rank 1 sends 2 to rank 0, which expects 1" in failure_of(make_world("tp=2"), body, CollectiveMismatch)


def test_arguments_of_one_rank_that_do_not_fit_together(make_world: MakeWorld) -> None:
    world = make_world("tp=2")
    cases: dict[str, Callable[[RankContext], Any]] = {
        "output float32[3] is not 2 times input float32[2]": lambda _: dist.all_gather_into_tensor(
            torch.empty(3), torch.ones(2)
        ),
        "input float32[3] is not 2 times output float32[1]": lambda _: dist.reduce_scatter_tensor(
            torch.empty(1), torch.ones(3)
        ),
        "1 outputs for 2 ranks": lambda _: dist.all_gather([torch.empty(1)], torch.ones(1)),
        "its own output slot is float32[2], but its input is float32[1]": lambda _: dist.all_gather(
            [torch.empty(2)] * 2, torch.ones(1)
        ),
        "1 inputs for 2 ranks": lambda _: dist.reduce_scatter(torch.empty(1), [torch.ones(1)]),
    }
    for shown, body in cases.items():
        assert shown in failure_of(world, body, CollectiveMismatch)
