# SPDX-License-Identifier: Apache-2.0
"""Makes torch.distributed aware of rank threads: each has its own default group; real groups in the process stay as they are."""

import itertools
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_here = threading.local()
BACKEND = "simulated"
_serial = itertools.count()


class _ThreadAwareWorld(c10d._World):
    """c10d's state, of which a rank thread sees its own default group and its own count of groups.

    The registries keyed by group object are shared; group names, by which functional collectives find a group, must
    therefore differ between ranks. The count makes them.
    """

    def __init__(self, real: c10d._World) -> None:
        super().__init__()
        self._real = real

    @property
    def default_pg(self) -> Any:
        return getattr(_here, "default_group", None) or self._real.default_pg

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        self._real.default_pg = value

    @property
    def group_count(self) -> int:
        return _here.group_count if hasattr(_here, "group_count") else self._real.group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        if hasattr(_here, "group_count"):
            _here.group_count = value
        else:
            self._real.group_count = value

    @property
    def pg_coalesce_state(self) -> Any:
        return self._real.pg_coalesce_state


def install() -> None:
    """Make torch.distributed thread-aware and tell it the name of our backend; again does nothing."""
    if not isinstance(c10d._world, _ThreadAwareWorld):
        c10d._world = _ThreadAwareWorld(c10d._world)
        dist.Backend.register_backend(BACKEND, lambda *_: None, devices=["cpu"])


def enter_rank_thread(default_group: dist.ProcessGroup) -> None:
    """Call once in each rank thread."""
    _here.default_group = default_group
    _here.group_count = next(_serial) * 1_000_000


def register(group: dist.ProcessGroup, name: str, ranks: tuple[int, ...], store: dist.Store) -> None:
    mapping = {rank: i for i, rank in enumerate(ranks)}
    c10d._register_pg_in_world(group, BACKEND, store, name, f"cpu:{BACKEND}", rank_mapping=mapping)  # pyright: ignore


def forget(group: dist.ProcessGroup) -> None:
    c10d._cleanup_process_group_global_state(group)
