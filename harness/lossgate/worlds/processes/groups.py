# SPDX-License-Identifier: Apache-2.0
"""The process groups and meshes of a rank, made when a task needs them and kept for later ones."""

from collections.abc import Callable
from datetime import timedelta
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lossgate.base.layout import AXES, Layout
from lossgate.worlds.base import RankContext
from lossgate.worlds.processes.rank_messages import Assignment
from lossgate.worlds.torch_versions import set_timeout

OpenStore = Callable[[str, int], dist.Store]
"""Opens the store of a meeting. It gets the name of the meeting, and the number of ranks."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_BETWEEN_CHECKS = 0.002
"""Seconds between two checks whether all ranks have made their groups."""
_PATIENCE = timedelta(hours=1)
"""Torch's own time-out. It is long, because the driver ends tasks that take too long."""
CONNECTING = 45.0
"""Seconds after which a rank gives up to connect to the others, if it can't be replaced. All such
ranks have arrived and are idle when a task comes, so they begin to connect within a few seconds."""


class RankGroups:
    """The groups of one rank. The rank is in the default group of each layout that it serves.

    Args:
        rank: its rank, the same in every layout.
        local_rank: its number among the ranks of this machine, which is also that of its GPU.
        open_store: opens the store of a meeting.
        connecting: seconds that it may wait for the connections of a group. Nothing can interrupt
            that wait. None if its process is replaced where it must stop there.
    """

    def __init__(self, rank: int, local_rank: int, open_store: OpenStore, connecting: float | None = None) -> None:
        self.rank, self._local_rank = rank, local_rank
        self._connecting = _PATIENCE if connecting is None else timedelta(seconds=connecting)
        self._open_store = open_store
        self._meeting = ""
        self._store: dist.Store | None = None
        self._meshes: dict[Layout, DeviceMesh] = {}

    def context(self, assignment: Assignment) -> RankContext:
        """Returns the context of a task. All ranks of its layout call this together."""
        layout, device = assignment.layout, _device_of(assignment, self._local_rank)
        if assignment.meeting != self._meeting:
            self.discard()
            self._meeting = assignment.meeting
            self._store = self._open_store(assignment.meeting, layout.ranks)
            dist.init_process_group(
                BACKENDS[device.type],
                store=self._store,
                rank=self.rank,
                world_size=layout.ranks,
                timeout=self._connecting,
                device_id=device if device.type == "cuda" else None,
            )
        if layout not in self._meshes:
            self._meshes[layout] = self._mesh(device, tuple(layout.sizes[axis] for axis in AXES))
            self._wait_for_all(layout)
        return RankContext(self.rank, layout, self._meshes[layout], device)

    def _mesh(self, device: torch.device, sizes: tuple[int, ...]) -> DeviceMesh:
        """Returns a new mesh. Its groups connect in limited time; only then they may wait long."""
        before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
        # No argument of a mesh sets the time-out of its groups.
        c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = self._connecting
        try:
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        finally:
            c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before
        for group in _real_groups():
            set_timeout(_PATIENCE, group)
        return mesh

    def _wait_for_all(self, layout: Layout) -> None:
        """Waits until all ranks have made the groups of a layout.

        Otherwise a rank whose task fails at once would leave while other ranks still connect to it,
        and a rank can't be stopped while it connects.
        """
        assert self._store is not None
        here = f"ranks with the groups of {layout}"
        self._store.add(here, 1)
        while self._store.add(here, 0) < layout.ranks:
            sleep(_BETWEEN_CHECKS)

    def calls(self) -> dict[str, int]:
        """Returns the number of calls of this rank on each group of several ranks, by its name."""
        return {name: group._get_sequence_number_for_group() for group, name in _real_groups().items()}

    def discard(self) -> None:
        """Forgets all groups, also those that tasks made."""
        self._meshes.clear()
        self._meeting = ""
        if dist.is_initialized():
            dist.destroy_process_group()
        # Torch counts the groups of a process, also those that could not be made. The numbers are
        # in the keys by which ranks meet: after different failures they would not meet again.
        c10d._world.group_count = 0


def _real_groups() -> dict[Any, str]:
    """Returns the names of the groups of several ranks of this process, by group."""
    names, kinds = c10d._world.pg_names, c10d._world.pg_map
    return {group: name for group, name in names.items() if group.size() > 1 and kinds[group][0] in BACKENDS.values()}


def _device_of(assignment: Assignment, local_rank: int) -> torch.device:
    if assignment.device == "cpu":
        return torch.device("cpu")
    device = torch.device(assignment.device, local_rank)
    torch.cuda.set_device(device)
    return device
