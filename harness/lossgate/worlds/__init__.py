# SPDX-License-Identifier: Apache-2.0
"""Where candidates run: a world gives every rank a device mesh and runs a body on all of them."""

from lossgate.worlds.base import Body, RankContext, RankFailure, World
from lossgate.worlds.simulated import SimulatedWorld

__all__ = ["Body", "RankContext", "RankFailure", "SimulatedWorld", "World"]
