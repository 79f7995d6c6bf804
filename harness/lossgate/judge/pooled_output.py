# SPDX-License-Identifier: Apache-2.0
"""Pools an output over many problems, which shows errors too small for one comparison.

Examples are a bias of 0.2% in bfloat16, and a sum in bfloat16 that is declared as float32.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from lossgate.judge.comparison import Comparison
from lossgate.judge.pooling import PooledNoise, pool_noise, pool_scales, smallest_bias
from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import Output


@dataclass(frozen=True)
class Pooled:
    """One output over the problems of a cell."""

    output: Output
    problems: int
    """Number of problems that say something about the scale."""
    scale: float
    """By how much the output is too large, relative to the reference."""
    sd: float
    """Standard deviation of ``scale``."""
    limit: float
    """Limit of ``abs(scale)``."""
    silent: int = 0
    """Number of problems in which rounding explains even a result of zero, and one of twice the
    reference."""
    noise: PooledNoise | None = None
    """The pooled noise; None if too few problems say something about it."""

    @property
    def scale_agrees(self) -> bool:
        return abs(self.scale) <= self.limit

    @property
    def noise_agrees(self) -> bool:
        return self.noise is None or self.noise.agrees

    @property
    def agrees(self) -> bool:
        return self.scale_agrees and self.noise_agrees

    @property
    def mde(self) -> float:
        """The minimum detectable effect: the pool rejects a kernel whose results are all larger, or
        all smaller, by more than this.
        """
        return self.limit + abs(self.scale)


def pool(output: Output, comparisons: Iterable[Comparison]) -> Pooled:
    """Pools comparisons of one output, without those that say nothing about its scale."""
    found = list(comparisons)
    used, silent = [c for c in found if c.tells_scale], sum(c.silent for c in found)
    if not used:
        return Pooled(output, 0, 0.0, inf, inf, silent)
    pooled = pool_scales(
        scales=[c.values[SCALE] for c in used],
        sds=[c.sd for c in used],
        means=[c.mean for c in used],
        limits=[c.limits[SCALE] for c in used],
        floors=[smallest_bias(max(c.unit for c in used), max(c.kernels for c in used))],
        sizes=[len(used)],
    )
    noise = pool_noise([c.noise for c in used if c.noise is not None])
    scale, sd, limit = float(pooled.scale[0]), float(pooled.sd[0]), float(pooled.limit[0])
    return Pooled(output, len(used), scale, sd, limit, silent, noise)
