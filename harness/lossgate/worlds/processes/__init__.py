# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes, with real process groups. The pool and torchrun share this.

Tasks and results travel on their own connections, not on the kernels' groups. So a kernel that
breaks its groups can't break the verdict.

Where to look:
    conductor: the driver's side of a task: sends it, waits, and stops ranks that hang.
    process_world: the world, and messages about what became of its ranks.
    rank_messages: what driver and ranks say to each other.
    server: the loop of a rank's process.
    groups: the process groups and meshes of a rank.
    watcher: tells where a rank is, and makes it stop.
"""
