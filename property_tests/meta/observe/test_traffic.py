# SPDX-License-Identifier: Apache-2.0
"""What ranks bring to collectives is the same on simulated ranks and in real process groups."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lossgate import Layout, Problem, candidate
from lossgate.cases.case import Case
from lossgate.observe import Use, observe
from lossgate.worlds import make_world
from lossgate.worlds.base import World

PROBLEM = Problem(
    spec="nll",
    head="hidden",
    dtype="float32",
    lengths=(4, 4, 4, 4),
    masks=("all",) * 4,
    hidden=2,
    vocab=8,
    layout=Layout(dp=2, tp=2),
)


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@candidate("nll", head="hidden", axes=("dp", "cp", "tp"), dtypes=("float32",))
def talkative(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    """Computes no loss, and brings known sizes to each kind of collective."""
    tp, dp, cp = (mesh.get_group(axis) for axis in ("tp", "dp", "cp"))
    dist.all_reduce(torch.ones(3), group=tp)
    dist.all_reduce(torch.ones(3), group=cp)  # a single rank: there is no traffic
    dist.all_gather([torch.empty(5) for _ in range(2)], torch.ones(5), group=dp)
    dist.all_gather_into_tensor(torch.empty(14), torch.ones(7), group=tp)
    dist.reduce_scatter_tensor(torch.empty(11), torch.ones(22), group=tp)
    dist.all_to_all_single(torch.empty(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64), group=dp)
    dist.broadcast(torch.ones(13, dtype=torch.int32), group_src=0, group=dp)
    dist.barrier(group=tp)
    hidden = Summed.apply(inputs.hidden, tp)
    return hidden.sum() + inputs.weight.sum()  # type: ignore[union-attr]


EXPECTED = {
    "all_reduce over tp": (3, 3 * 4 + 2 * 8 * 2 * 4),
    "all_gather over dp": (1, 5 * 4),
    "all_gather_into_tensor over tp": (1, 7 * 4),
    "reduce_scatter_tensor over tp": (1, 22 * 4),
    "all_to_all_single over dp": (1, 4 * 8),
    "broadcast over dp": (1, 13 * 4),
    "barrier over tp": (1, 0),
}


@pytest.fixture(params=["simulated", "gloo"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = make_world(request.param, PROBLEM.layout)
    yield world
    world.close()


def used(world: World, problem: Problem = PROBLEM) -> Use:
    case = Case(talkative, problem, world)
    return observe(case, case.placed.batch)


def test_each_collective_over_several_ranks_is_counted(world: World) -> None:
    found = used(world)
    assert found.by_kind() == EXPECTED
    assert found.bytes == sum(size for _, size in EXPECTED.values())
    assert len(found.collectives) == sum(calls for calls, _ in EXPECTED.values())


def test_memory_is_the_same_in_both_worlds() -> None:
    """What a simulated world makes itself, to add up and to copy, is not the kernel's. Gloo may
    keep an input of a collective a little longer.
    """
    uses: list[Use] = []
    for name in ("simulated", "gloo"):
        world = make_world(name, PROBLEM.layout)
        uses.append(used(world))
        world.close()
    one, other = uses
    assert one.largest == other.largest
    assert one.saved <= other.saved
    assert all(one.peak[phase] <= other.peak[phase] for phase in one.peak)


@candidate("nll", head="hidden", axes=("tp",), dtypes=("float32",))
def reducing(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    dist.all_reduce(torch.ones(3), group=mesh.get_group("tp"))
    return inputs.hidden.sum() + inputs.weight.sum()


@pytest.mark.parametrize(("layout", "calls"), [("single", 0), ("tp=2", 1)])
def test_one_rank_brings_nothing(layout: str, calls: int, make_world: Any) -> None:
    case = Case(reducing, replace(PROBLEM, layout=Layout.parse(layout)), make_world(layout))
    assert len(observe(case, case.placed.batch).collectives) == calls


def test_sends_are_counted_where_they_are_sent(make_world: Any) -> None:
    world = make_world("dp=2,tp=2")
    case = Case(sending, PROBLEM, world)
    assert observe(case, case.placed.batch).by_kind() == {"send over dp": (1, 6 * 4)}


@candidate("nll", head="hidden", axes=("dp", "cp", "tp"), dtypes=("float32",))
def sending(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    group = mesh.get_group("dp")
    if group.rank() == 0:
        dist.send(torch.ones(6), group=group, group_dst=1)
    else:
        dist.recv(torch.empty(6), group=group, group_src=0)
    return inputs.hidden.sum() + inputs.weight.sum()
