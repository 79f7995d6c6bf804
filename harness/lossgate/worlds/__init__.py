# SPDX-License-Identifier: Apache-2.0
"""Where candidates run: a world gives every rank a device mesh and runs a task on all of them."""

from lossgate.layout import Layout
from lossgate.spelling import look_up
from lossgate.worlds.base import RankContext, RankFailure, Task, World
from lossgate.worlds.simulated import SimulatedWorld

WORLDS = {"simulated": SimulatedWorld}
"""The worlds, by name. A new one is added here and in its own folder."""


def make_world(name: str, layout: Layout, timeout: float = 60.0) -> World:
    """Returns a world of some ranks.

    Args:
        name: which kind of world.
        layout: its ranks.
        timeout: seconds after which a rank that reaches no collective counts as hanging.

    Raises:
        UsageError: if there is no such world.
    """
    return look_up("world", name, WORLDS)(layout, timeout)


__all__ = ["WORLDS", "RankContext", "RankFailure", "SimulatedWorld", "Task", "World", "make_world"]
