# SPDX-License-Identifier: Apache-2.0
"""Reads the ranks that torchrun gives to the processes that it launches. It does not load torch."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes that torchrun launched."""

    rank: int
    local_rank: int
    """The number of the process on this machine. Its GPU has the same number."""
    ranks: int
    host: str
    """The host of rank 0."""


def launch_of_torchrun() -> Launch | None:
    """Returns the place of this process, or None if torchrun did not launch it."""
    given = os.environ
    if "TORCHELASTIC_RUN_ID" not in given:
        return None
    return Launch(int(given["RANK"]), int(given["LOCAL_RANK"]), int(given["WORLD_SIZE"]), given["MASTER_ADDR"])


def is_follower() -> bool:
    """Returns whether torchrun launched this process with a rank other than 0."""
    launch = launch_of_torchrun()
    return launch is not None and launch.rank > 0
