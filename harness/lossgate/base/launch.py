# SPDX-License-Identifier: Apache-2.0
"""What torchrun tells the processes that it launches. This module does not load torch."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Where this process stands among those that torchrun launched."""

    rank: int
    local_rank: int
    """Its number among the processes on this machine, and that of its GPU."""
    ranks: int
    host: str
    """The host of rank 0."""


def launch_of_torchrun() -> Launch | None:
    """Returns where this process stands, or None if torchrun did not launch it."""
    given = os.environ
    if "TORCHELASTIC_RUN_ID" not in given:
        return None
    return Launch(int(given["RANK"]), int(given["LOCAL_RANK"]), int(given["WORLD_SIZE"]), given["MASTER_ADDR"])


def is_follower() -> bool:
    """Returns whether torchrun launched this process as another rank than 0."""
    launch = launch_of_torchrun()
    return launch is not None and launch.rank > 0
