# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in kernels that communicate, each as a task for four ranks, on a group of all."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lossgate.worlds import RankContext

Fault = Callable[[RankContext], Any]
CULPRIT = 2
"""The rank that goes wrong."""


def healthy(context: RankContext) -> float:
    """Returns the sum of the ranks, by way of each group of a mesh."""
    total = torch.tensor(float(context.rank), device=context.device)
    for name in context.mesh.mesh_dim_names or ():
        dist.all_reduce(total, group=context.mesh.get_group(name))
    return total.item()


def _other_shape(context: RankContext) -> Tensor:
    return _summed(torch.ones(3 if context.rank == CULPRIT else 2))


def _other_shape_of_one_size(context: RankContext) -> Tensor:
    return _summed(torch.ones(2, 3) if context.rank == CULPRIT else torch.ones(3, 2))


def _other_dtype_of_one_width(context: RankContext) -> Tensor:
    return _summed(torch.ones(4, dtype=torch.int32 if context.rank == CULPRIT else torch.float32))


def _other_dtype(context: RankContext) -> Tensor:
    return _summed(torch.ones(4, dtype=torch.bfloat16 if context.rank == CULPRIT else torch.float32))


def _other_reduction(context: RankContext) -> Tensor:
    tensor = torch.ones(4)
    dist.all_reduce(tensor, dist.ReduceOp.MAX if context.rank == CULPRIT else dist.ReduceOp.SUM)
    return tensor


def _other_collective(context: RankContext) -> Tensor:
    tensor = torch.ones(4)
    if context.rank == CULPRIT:
        dist.broadcast(tensor, 0)
    else:
        dist.all_reduce(tensor)
    return tensor


def _other_root(context: RankContext) -> Tensor:
    tensor = torch.ones(4)
    dist.broadcast(tensor, CULPRIT if context.rank == CULPRIT else 0)
    return tensor


def _extra_call(context: RankContext) -> Tensor:
    tensor = _summed(torch.ones(4))
    return _summed(tensor) if context.rank == CULPRIT else tensor


def _missing_call(context: RankContext) -> Tensor:
    tensor = _summed(torch.ones(4))
    return tensor if context.rank == CULPRIT else _summed(tensor)


def _returns_early(context: RankContext) -> Tensor | None:
    return None if context.rank == CULPRIT else _summed(torch.ones(4))


def _nan_under_max(context: RankContext) -> Tensor:
    tensor = torch.full((8,), float("nan") if context.rank == CULPRIT else 1.0)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def _sends_that_cross(context: RankContext) -> Tensor:
    """Each rank sends to its neighbour before it receives. It works if sends are buffered."""
    tensor, neighbour = torch.ones(4), context.rank ^ 1
    dist.send(tensor, neighbour)
    dist.recv(tensor, neighbour)
    return tensor


def _raises(context: RankContext) -> Tensor:
    if context.rank == CULPRIT:
        raise ValueError("no kernel today")
    return _summed(torch.ones(4))


def _never_returns(context: RankContext) -> Tensor:
    while context.rank == CULPRIT:
        time.sleep(0.001)
    return _summed(torch.ones(4))


def _summed(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor


FAULTS: Mapping[str, Fault] = {
    "another shape": _other_shape,
    "another shape of the same size": _other_shape_of_one_size,
    "int32 in place of float32": _other_dtype_of_one_width,
    "bfloat16 in place of float32": _other_dtype,
    "MAX in place of SUM": _other_reduction,
    "broadcast in place of all_reduce": _other_collective,
    "another root": _other_root,
    "an extra call": _extra_call,
    "a missing call": _missing_call,
    "a return before the first call": _returns_early,
    "NaN under MAX": _nan_under_max,
    "sends that cross": _sends_that_cross,
    "an exception": _raises,
    "an endless loop": _never_returns,
}
"""By name: what one rank, or each, does."""


def _all_gather(tensor: Tensor) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor)


def _reduce_scatter(tensor: Tensor) -> None:
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * dist.get_world_size()))


def _all_to_all(tensor: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(tensor), tensor)


def _around(tensor: Tensor) -> None:
    """Sends to the next rank and receives from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(tensor, (rank + 1) % ranks)
    dist.recv(torch.empty_like(tensor), (rank - 1) % ranks)
    assert sent is not None
    sent.wait()


COLLECTIVES: Mapping[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda tensor: dist.broadcast(tensor, 0),
    "all_gather": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "barrier": lambda tensor: dist.barrier(),
    "send and recv": _around,
}


ENDS: Mapping[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
}
"""How a process ends."""


def ends_at(collective: str, end: str) -> Fault:
    """Returns a task in which one rank's process ends where the others call a collective."""

    def task(context: RankContext) -> None:
        if context.rank == CULPRIT:
            ENDS[end]()
        COLLECTIVES[collective](torch.ones(4))

    return task
