# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun has launched, on one machine or several.

The process of rank 0 drives: it draws problems, judges and prints. It also is a rank, in a thread.
All others serve until it is done.
"""

from lossgate.worlds.torchrun.driver import dismiss, follow, launched_ranks, torchrun_world

__all__ = ["dismiss", "follow", "launched_ranks", "torchrun_world"]
