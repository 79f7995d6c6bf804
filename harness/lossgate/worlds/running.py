# SPDX-License-Identifier: Apache-2.0
"""Functions for code that runs on ranks: ``current_mesh`` and ``all_ranks_assert``."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lossgate.base.errors import UsageError
from lossgate.base.layout import name_ranks

_running: list[Callable[[], DeviceMesh | None]] = []
"""One function for each run under way in this process. It returns the mesh of the rank that runs,
or None if that rank has not joined its groups yet."""


def current_mesh() -> DeviceMesh:
    """Returns the mesh of the rank that runs now. Its kernel gets the same as ``mesh``.

    It is for frameworks that keep their groups in variables of the process. Simulated ranks are
    threads of one process and share those variables, so have the framework's functions ask here::

        parallel_state.get_tensor_model_parallel_group = lambda *args, **kwargs: (
            lossgate.current_mesh().get_group("tp")
        )

    It works in forward and backward, also in threads that torch starts for backward, and in worlds
    whose ranks are processes.

    Raises:
        UsageError: if no rank runs, for example while a module is imported.
    """
    mesh = _running[-1]() if _running else None
    if mesh is None:
        raise UsageError("current_mesh(): no rank runs now; call it in a kernel, or in a function that a kernel calls")
    return mesh


@contextmanager
def running(mesh: Callable[[], DeviceMesh | None]) -> Generator[None]:
    """Makes ``current_mesh`` work during a run.

    Args:
        mesh: returns the mesh of the rank that runs.
    """
    _running.append(mesh)
    try:
        yield
    finally:
        _running.remove(mesh)


def all_ranks_assert(condition: bool | Tensor, message: str = "", group: Any = None) -> None:
    """Checks a condition on every rank of a group, and fails on all of them if it fails on one.

    A plain ``assert`` ends one rank, and leaves the others in their next collective. All ranks of
    the group must call this, as they would a collective.

    Args:
        condition: what should hold on this rank: a bool, or a tensor of one entry.
        message: what is wrong if it does not hold.
        group: the ranks that check together; by default all ranks.

    Raises:
        AssertionError: on each rank of the group. It names the ranks on which the condition fails.
    """
    if not dist.is_initialized():
        assert condition, message
        return
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    held = torch.tensor([bool(condition)], dtype=torch.uint8, device=device)
    of_all = [torch.empty_like(held) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, held, group=group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    failed = [rank for rank, on_rank in zip(ranks, of_all, strict=True) if not on_rank.item()]
    if failed:
        raise AssertionError(f"{message or 'the condition does not hold'} (on {name_ranks(failed)})")
