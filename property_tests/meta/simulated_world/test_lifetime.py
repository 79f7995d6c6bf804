# SPDX-License-Identifier: Apache-2.0
"""A world serves many runs, beside other worlds and real groups, and each run gives the same."""

import threading
import weakref

import torch
import torch.distributed as dist

from lossgate import Layout
from lossgate.worlds import RankContext

from .on_ranks import MakeWorld, healthy


def test_two_worlds_and_a_real_group_in_one_process(make_world: MakeWorld) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one, other = make_world("tp=2"), make_world("dp=3")
        assert healthy(one)
        assert healthy(other)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert (x.item(), dist.get_world_size()) == (1, 1)
        assert healthy(one)
    finally:
        dist.destroy_process_group()


def test_runs_are_deterministic_and_logged(make_world: MakeWorld) -> None:
    world = make_world("dp=2,tp=2")

    def body(context: RankContext) -> None:
        dist.all_reduce(torch.ones(2, 3), group=context.mesh.get_group("tp"))
        dist.all_reduce(torch.ones(1, dtype=torch.bfloat16))

    world.run(body)
    first = [(entry.rank, entry.group, entry.collective, entry.shown, entry.bytes) for entry in world.log]
    world.run(body)
    assert first == [(entry.rank, entry.group, entry.collective, entry.shown, entry.bytes) for entry in world.log]
    assert first[0] == (0, "tp[0, 1]", "all_reduce", "SUM, [float32[2, 3]]", 24)
    assert sum(1 for entry in first if entry[1] == "world[0, 1, 2, 3]") == 4
    assert len(first) == 8


def test_ranks_stay_alive_between_runs(make_world: MakeWorld) -> None:
    world = make_world("tp=2")
    idents = world.run(lambda context: threading.get_ident())
    assert world.run(lambda context: threading.get_ident()) == idents
    thread = weakref.ref(next(t for t in threading.enumerate() if t.ident == idents[0]))
    world.close()
    assert thread() is None or not thread().is_alive()  # type: ignore[union-attr]


def test_a_world_has_its_layout(make_world: MakeWorld) -> None:
    assert make_world("dp=2,tp=2").layout == Layout(dp=2, tp=2)
