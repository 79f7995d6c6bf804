# SPDX-License-Identifier: Apache-2.0
"""A rank that keeps running is an error after the timeout, with its stack."""

import gc
import sys
import time
from types import FrameType

import pytest
import torch.distributed as dist

from lossgate.worlds import RankContext
from lossgate.worlds.base import Hang
from lossgate.worlds.simulated import lockstep

from .on_ranks import MakeWorld, failure_of


def test_a_hanging_rank_is_named_with_its_stack(make_world: MakeWorld) -> None:
    def spin(context: RankContext) -> None:
        while context.rank == 1:
            pass

    message = failure_of(make_world("tp=2", timeout=0.5), spin, Hang)
    assert "hang: rank 1 neither reached a collective nor returned within 0.5 s" in message
    assert "while context.rank == 1" in message


def test_a_rank_that_hangs_after_a_collective_is_named(make_world: MakeWorld) -> None:
    def spin(context: RankContext) -> None:
        dist.barrier()  # rank 0 waits for the others here
        while context.rank == 0:
            pass

    assert "hang: rank 0 " in failure_of(make_world("tp=2", timeout=0.5), spin, Hang)


def test_a_slow_run_that_makes_progress_is_no_hang(make_world: MakeWorld) -> None:
    def body(context: RankContext) -> None:
        for _ in range(8):
            time.sleep(0.1)
            dist.barrier()

    make_world("tp=2", timeout=0.5).run(body)


def test_a_rank_that_hangs_where_python_can_not_interrupt_it(make_world: MakeWorld) -> None:
    def sleep(context: RankContext) -> None:
        if context.rank == 0:
            time.sleep(2.5)
        dist.barrier()

    assert "time.sleep(2.5)" in failure_of(make_world("tp=2", timeout=0.5), sleep, Hang)


def test_a_rank_that_ends_just_when_it_is_interrupted_serves_the_next_run(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_stack(thread: int | None) -> str:
        time.sleep(0.6)  # meanwhile the rank ends
        return "the last line"

    def slow(context: RankContext) -> int:
        time.sleep(0.6)
        return context.rank

    monkeypatch.setattr(lockstep, "stack_of", slow_stack)
    world = make_world("tp=2", timeout=0.2)
    assert "the last line" in failure_of(world, slow, Hang)
    assert world.run(lambda context: context.rank) == [0, 1]


def test_a_rank_that_is_slow_in_passing_the_baton_on_does_not_hang(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = lockstep.Lockstep._exchange

    def slowly(self: lockstep.Lockstep, rank: int, successor: int) -> None:
        time.sleep(0.6)
        exchange(self, rank, successor)

    monkeypatch.setattr(lockstep.Lockstep, "_exchange", slowly)

    def body(context: RankContext) -> int:
        dist.barrier()
        return context.rank

    assert make_world("tp=2", timeout=0.2).run(body) == [0, 1]


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_python_lists_its_threads(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """CPython 3.11.7 may wait for ever there, and did so here once."""
    seen, frames = list[bool](), sys._current_frames

    def listed() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return frames()

    def sleep(context: RankContext) -> None:
        time.sleep(1.0)

    monkeypatch.setattr(sys, "_current_frames", listed)
    if not collects:
        gc.disable()
    try:
        failure_of(make_world("single", timeout=0.3), sleep, Hang)
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert seen
    assert not any(seen)
