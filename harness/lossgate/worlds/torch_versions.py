# SPDX-License-Identifier: Apache-2.0
"""What differs between the versions of torch with which lossgate works.

Simulated ranks hook into private parts of ``torch.distributed``. That these are there is checked
when this module is imported, so that a torch without them is refused, and no kernel is blamed.
"""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lossgate import TESTED_TORCH
from lossgate.base.errors import UsageError

_c10d: Any = distributed_c10d
_NEEDED = (
    *("_World", "_world", "_get_default_group", "_register_process_group", "_resolve_process_group"),
    *("_cleanup_process_group_global_state", "default_pg_timeout", "default_pg_nccl_timeout"),
)
"""Private names of ``torch.distributed.distributed_c10d`` that worlds use, in all versions."""

MIXED_DEVICES = ("same device", "found two different devices")
"""Words of errors about fake tensors of several devices. 2.11 and 2.12 say the second."""


def check_torch(version: str, c10d: ModuleType) -> None:
    """Refuses a torch with which lossgate does not work.

    A newer version than those that are tested is not refused, unless it lacks a name.

    Args:
        version: the version of torch, such as ``"2.11.0+cu130"``.
        c10d: its module ``torch.distributed.distributed_c10d``.

    Raises:
        UsageError: if the version is too old, or a name is missing.
    """
    oldest, newest = TESTED_TORCH
    missing = ", ".join(name for name in _NEEDED if not hasattr(c10d, name))
    if _number(version) < _number(oldest) or missing:
        why = f"; this one lacks {missing} of torch.distributed" if missing else ""
        raise UsageError(
            f"torch {version}: expected a version from {oldest} to {newest}{why}; install one of them, for example "
            f"with pip install 'torch=={newest}.*'"
        )


def _number(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version. What follows may be anything, as ``"0a0"``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


check_torch(torch.__version__, distributed_c10d)

set_timeout: Any = getattr(dist, "set_timeout", None) or _c10d._set_pg_timeout
"""Sets the time-out of a group. 2.14 has it without an underscore, and warns of the other name."""


def survive_ended_threads() -> None:
    """Keeps torch from a crash in threads of ranks that use fake tensors, as DTensor does.

    2.11 for CUDA, on a machine without a GPU, keeps an object of the first thread that uses them,
    and crashes in the next one once that has ended. It is there for tensors on CUDA, which are none
    of a simulated rank's without a GPU.
    """
    if _number(torch.__version__) < (2, 12):
        setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)  # noqa: B010  torch's stubs lack it


def register_group(
    group: dist.ProcessGroup, name: str, backend: str, backends: str, store: dist.Store, ranks: dict[int, int]
) -> None:
    """Adds a group to torch's registries, as ``dist.new_group`` does with those that it makes.

    Torch has a function for this since 2.13, ``_register_pg_in_world``. 2.11 and 2.12 write into
    the same registries where they make a group, which are the same in all versions.

    Args:
        group: one rank's object for the group.
        name: the name under which functional collectives find it, unique in the process.
        backend: the name of its backend.
        backends: the same by device, such as ``"cpu:gloo,cuda:nccl"``.
        store: the store that torch keeps with a group.
        ranks: maps the rank of each member in the world to its rank in the group.
    """
    world = _c10d._world
    world.pg_map[group] = backend, store
    world.pg_names[group] = name
    world.pg_backend_config[group] = backends
    world.pg_group_ranks[group] = ranks
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    _c10d._register_process_group(name, group)


def make_group(options: Any, _: object) -> dist.ProcessGroup:
    """Makes a rank's member of a new group of simulated ranks, as a creator of ``dist.Backend``.

    Since 2.13 ``dist.new_group`` asks the method ``new_group`` of the default group for it. 2.11
    and 2.12 ask the creator of the backend, which passes it on, and give it no label.
    """
    return _c10d._get_default_group().new_group(options.global_ranks_in_group, group_name=options.group_id)
