# SPDX-License-Identifier: Apache-2.0
"""An output over many problems: errors too small for one comparison.

A bias of 0.2% in bfloat16 is one, and a sum in bfloat16 that is declared as one in float32.
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
    """Those that say something about its scale."""
    scale: float
    sd: float
    limit: float
    silent: int = 0
    """Problems in which rounding explains a result of zero, and one that is twice as large."""
    noise: PooledNoise | None = None
    """None if too few problems say something about its noise."""

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
        """The minimum detectable effect: the pool rejects results that are all larger or smaller by
        more than this.
        """
        return self.limit + abs(self.scale)


def pool(output: Output, comparisons: Iterable[Comparison]) -> Pooled:
    """Pools comparisons of one output. Those that say nothing about its scale are left out."""
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
