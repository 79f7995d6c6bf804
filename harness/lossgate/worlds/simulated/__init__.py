# SPDX-License-Identifier: Apache-2.0
"""The simulated world: all ranks in this process, with real ``DeviceMesh`` objects.

Kernels make ordinary ``torch.distributed`` calls. A run is deterministic, and a collective takes a
few tenths of a millisecond. The world is stricter than real libraries. It raises at once if calls
do not match, if ranks deadlock, or if a rank uses another rank's group, makes a call in a thread
that it has started, or writes to a tensor of a call before ``wait()``. An output that is read
before ``wait()`` is NaN, or an extreme value of its dtype. A send waits for its receive, as NCCL's
do, so a kernel that passes needs no buffer of a library. Each rank sees its own default dtype,
random numbers and environment, as in a process of its own. It must leave settings and environment
as they were.

Where to look:
    simulated_world: the world and its ranks.
    group, member: the process group that kernels use.
    collectives: what a collective is called with, and what it does.
    rendezvous, point_to_point: how calls of several ranks meet.
    in_flight: whether a kernel wrote to a tensor of a call in flight.
    reduction: the order in which sums are added.
    lockstep: the rank threads, deadlocks and hangs.
    rank_threads: how torch.distributed comes to know them.
    ../call_sites: the line of the kernel that a message names.
"""

from lossgate.worlds.simulated.simulated_world import SimulatedWorld

__all__ = ["SimulatedWorld"]
