# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun has launched, on one machine or several.

The process of rank 0 drives: it draws problems, judges and prints. One of its threads is rank 0
itself. All other processes serve as ranks until rank 0 is done.
"""

from lossgate.worlds.torchrun.driver import dismiss, follow, launched_ranks, torchrun_world

__all__ = ["dismiss", "follow", "launched_ranks", "torchrun_world"]
