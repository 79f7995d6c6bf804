# SPDX-License-Identifier: Apache-2.0
"""Makes torch.distributed aware of rank threads, and leaves real groups as they are."""

import itertools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lossgate.worlds.torch_versions import make_group, register_group, survive_ended_threads

BACKEND = "simulated"
_DEVICES = ("cpu", "cuda")
_BACKENDS = ",".join(f"{device}:{BACKEND}" for device in _DEVICES)
_of_thread = threading.local()
"""The default group and the count of groups of each rank thread."""
_of_running_rank: list[Callable[[], dist.ProcessGroup | None]] = []
"""One function for each run under way. It returns the default group of the rank with the baton."""
_serial = itertools.count()


class _ThreadAwareWorld(c10d._World):
    """The state of c10d, in which each rank thread has its own default group and count of groups.

    A thread that a kernel starts finds the default group of the running rank. That group then
    reports the thread's calls as misuse.

    All threads share the other registries. Functional collectives find a group there by its name,
    so names must differ between ranks. Torch makes a name from the count of groups.
    """

    def __init__(self, real: c10d._World) -> None:
        super().__init__()
        self._real = real

    @property
    def default_pg(self) -> Any:
        group = getattr(_of_thread, "default_group", None) or self._real.default_pg
        if group is None and _of_running_rank:
            return _of_running_rank[-1]()
        return group

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        self._real.default_pg = value

    @property
    def group_count(self) -> int:
        return _of_thread.group_count if hasattr(_of_thread, "group_count") else self._real.group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        if hasattr(_of_thread, "group_count"):
            _of_thread.group_count = value
        else:
            self._real.group_count = value

    @property
    def pg_coalesce_state(self) -> Any:
        return self._real.pg_coalesce_state


def install() -> None:
    """Makes torch.distributed aware of rank threads. A second call does nothing."""
    if not isinstance(c10d._world, _ThreadAwareWorld):
        survive_ended_threads()
        c10d._world = _ThreadAwareWorld(c10d._world)
        dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=list(_DEVICES))


def enter_rank_thread(default_group: dist.ProcessGroup) -> None:
    """Gives the calling thread its default group. Each rank thread calls this once.

    Args:
        default_group: the thread's object for the group of all ranks.
    """
    _of_thread.default_group = default_group
    _of_thread.group_count = next(_serial) * 1_000_000  # so that no two threads name a group alike


@contextmanager
def helper_threads_find(default_group: Callable[[], dist.ProcessGroup | None]) -> Generator[None]:
    """Gives threads of no rank a default group during a run.

    Args:
        default_group: returns the default group of the running rank, or None if that rank has not
            entered yet.
    """
    _of_running_rank.append(default_group)
    try:
        yield
    finally:
        _of_running_rank.remove(default_group)


def register(group: dist.ProcessGroup, name: str, ranks: tuple[int, ...], store: dist.Store) -> None:
    """Registers a group that ``dist.new_group`` did not make.

    Args:
        group: one rank's object for the group.
        name: the name under which functional collectives find it, unique in the process.
        ranks: the members, as ranks of the world.
        store: the store that torch keeps with a group; no simulated collective uses it.
    """
    mapping = {rank: i for i, rank in enumerate(ranks)}
    register_group(group, name, BACKEND, _BACKENDS, store, mapping)


def forget(group: dist.ProcessGroup) -> None:
    """Removes a group from torch's registries."""
    c10d._cleanup_process_group_global_state(group)
