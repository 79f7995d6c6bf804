# SPDX-License-Identifier: Apache-2.0
"""Where candidates run: a world gives every rank a device mesh and runs a task on all of them."""

from collections.abc import Callable, Mapping

import torch

from lossgate.base.errors import UsageError
from lossgate.base.layout import MAX_RANKS, Layout
from lossgate.base.names import DEVICES
from lossgate.base.spelling import look_up, nearest
from lossgate.worlds.base import RankContext, RankFailure, Task, World
from lossgate.worlds.pool import gloo_world, nccl_world
from lossgate.worlds.simulated import SimulatedWorld
from lossgate.worlds.torchrun import launched_ranks, torchrun_world

WORLDS: Mapping[str, Callable[[Layout, float, str], World]] = {
    "simulated": SimulatedWorld,
    "gloo": gloo_world,
    "nccl": nccl_world,
    "torchrun": torchrun_world,
}
"""The worlds, by name. A new world is added here and in ``base.names``, and gets its own folder."""


def most_ranks(world: str) -> int:
    """Returns how many ranks a world can have.

    Raises:
        UsageError: if there is no such world, or it can have no ranks here.
    """
    look_up("world", world, WORLDS)
    return launched_ranks() if world == "torchrun" else MAX_RANKS


def make_world(name: str, layout: Layout, timeout: float = 60.0, device: str = "cpu") -> World:
    """Returns a world of some ranks.

    Args:
        name: the name of the world, a key of ``WORLDS``.
        layout: the layout of its ranks.
        timeout: seconds after which ranks that do not go on count as hanging.
        device: where the ranks compute, ``"cpu"`` or ``"cuda"``.

    Raises:
        UsageError: if there is no such world, or it can't have that device or so many ranks.
    """
    make = look_up("world", name, WORLDS)
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}; {nearest(device, DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch sees no CUDA device; choose device 'cpu', or install torch for CUDA")
    return make(layout, timeout, device)


__all__ = ["WORLDS", "RankContext", "RankFailure", "SimulatedWorld", "Task", "World", "make_world", "most_ranks"]
