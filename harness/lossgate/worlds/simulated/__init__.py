# SPDX-License-Identifier: Apache-2.0
"""The simulated world: every rank in this process, with real DeviceMesh and ordinary torch.distributed calls.

Deterministic, a few tenths of a millisecond per collective, and stricter than real libraries: mismatched calls,
deadlocks, use of another rank's group, and results touched before ``wait()`` are errors at once.
"""

from lossgate.worlds.simulated.world import SimulatedWorld

__all__ = ["SimulatedWorld"]
