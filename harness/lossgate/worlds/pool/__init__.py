# SPDX-License-Identifier: Apache-2.0
"""A pool of processes on this machine, one for each rank, with gloo or nccl.

The processes are started when a world first needs them, and serve every later one. One that died or
had to be killed is replaced before the next task.
"""

from lossgate.worlds.pool.pool import close_pool, gloo_world, nccl_world

__all__ = ["close_pool", "gloo_world", "nccl_world"]
