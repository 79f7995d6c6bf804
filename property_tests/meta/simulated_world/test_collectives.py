# SPDX-License-Identifier: Apache-2.0
# Kernels use the older names of collectives too.
# pyright: reportDeprecated=false
"""Every collective gives each rank its result."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist

from lossgate.worlds import RankContext

from .on_ranks import MakeWorld, of_rank

# Each body runs on one of three ranks, calls one collective, and returns what it got.


def all_reduce(rank: int, op: Any) -> list[float]:
    x = of_rank(rank + 1, 2)
    dist.all_reduce(x, op=op)
    return x.tolist()


def all_gather(rank: int) -> list[list[float]]:
    gathered = [torch.zeros(r + 1) for r in range(3)]
    dist.all_gather(gathered, of_rank(rank, rank + 1))
    return [t.tolist() for t in gathered]


def all_gather_into_tensor(rank: int) -> list[float]:
    whole = torch.empty(6)
    dist.all_gather_into_tensor(whole, of_rank(rank, 2))
    return whole.tolist()


def reduce_scatter_tensor(rank: int) -> list[float]:
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(6.0) + rank)
    return part.tolist()


def reduce_scatter(rank: int) -> list[float]:
    part = torch.empty(2)
    dist.reduce_scatter(part, list((torch.arange(6.0) * rank).split(2)))
    return part.tolist()


def broadcast(rank: int) -> float:
    x = of_rank(rank, 1)
    dist.broadcast(x, src=1)
    return x.item()


def reduce(rank: int) -> float:
    x = of_rank(rank, 1)
    dist.reduce(x, dst=2)
    return x.item()


def all_to_all_single(rank: int) -> list[float]:
    sent = [1, 2, 3] if rank == 0 else [0, 1, 0]
    received = [([1, 0, 0], [2, 1, 1], [3, 0, 0])[rank][sender] for sender in range(3)]
    out = torch.empty(sum(received))
    dist.all_to_all_single(out, of_rank(rank, sum(sent)), received, sent)
    return out.tolist()


def all_to_all(rank: int) -> list[float]:
    outs = [torch.empty(1) for _ in range(3)]
    dist.all_to_all(outs, [of_rank(10 * rank + to, 1) for to in range(3)])
    return [t.item() for t in outs]


def gather(rank: int) -> list[float] | None:
    slots = [torch.empty(1) for _ in range(3)] if rank == 0 else None
    dist.gather(of_rank(rank, 1), slots, dst=0)
    return [t.item() for t in slots] if slots else None


def scatter(rank: int) -> float:
    own = torch.empty(1)
    dist.scatter(own, [of_rank(r, 1) for r in (7, 8, 9)] if rank == 0 else None, src=0)
    return own.item()


def all_gather_object(rank: int) -> list[int]:
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, {"rank": rank})
    return [o["rank"] for o in objects]


COLLECTIVES: dict[str, tuple[Callable[[int], Any], list[Any]]] = {
    # name: body, what it returns on each rank (ANY: undefined there)
    "all_reduce SUM": (partial(all_reduce, op=dist.ReduceOp.SUM), [[6, 6]] * 3),
    "all_reduce AVG": (partial(all_reduce, op=dist.ReduceOp.AVG), [[2, 2]] * 3),
    "all_reduce MAX": (partial(all_reduce, op=dist.ReduceOp.MAX), [[3, 3]] * 3),
    "all_reduce MIN": (partial(all_reduce, op=dist.ReduceOp.MIN), [[1, 1]] * 3),
    "all_reduce PRODUCT": (partial(all_reduce, op=dist.ReduceOp.PRODUCT), [[6, 6]] * 3),
    "all_gather": (all_gather, [[[0], [1, 1], [2, 2, 2]]] * 3),
    "all_gather_into_tensor": (all_gather_into_tensor, [[0, 0, 1, 1, 2, 2]] * 3),
    "reduce_scatter_tensor": (reduce_scatter_tensor, [[3, 6], [9, 12], [15, 18]]),
    "reduce_scatter": (reduce_scatter, [[0, 3], [6, 9], [12, 15]]),
    "broadcast": (broadcast, [1, 1, 1]),
    "reduce": (reduce, [ANY, ANY, 3]),
    "all_to_all_single": (all_to_all_single, [[0], [0, 0, 1, 2], [0, 0, 0]]),
    "all_to_all": (all_to_all, [[0, 10, 20], [1, 11, 21], [2, 12, 22]]),
    "gather": (gather, [[0, 1, 2], None, None]),
    "scatter": (scatter, [7, 8, 9]),
    "all_gather_object": (all_gather_object, [[0, 1, 2]] * 3),
    "barrier": (lambda _: dist.barrier(), [None] * 3),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective(make_world: MakeWorld, name: str) -> None:
    body, expected = COLLECTIVES[name]
    assert make_world("tp=3").run(lambda context: body(context.rank)) == expected


def test_all_collectives_in_one_run(make_world: MakeWorld) -> None:
    found = make_world("tp=3").run(lambda context: [body(context.rank) for body, _ in COLLECTIVES.values()])
    for rank in range(3):
        assert found[rank] == [expected[rank] for _, expected in COLLECTIVES.values()]


def test_all_to_all_in_place(make_world: MakeWorld) -> None:
    """Every rank's input is read before any output is written, even where both are one tensor."""

    def task(context: RankContext) -> list[float]:
        tensor = torch.tensor([0.0, 1.0]) + 10 * context.rank
        dist.all_to_all_single(tensor, tensor, group=context.mesh.get_group("tp"))
        return tensor.tolist()

    assert make_world("tp=2").run(task) == [[0.0, 10.0], [1.0, 11.0]]
