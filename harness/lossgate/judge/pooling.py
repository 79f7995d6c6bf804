# SPDX-License-Identifier: Apache-2.0
"""The scale of an output over many problems: errors too small for one comparison, such as a bias of
0.2% in bf16.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from lossgate.judge.comparison import Comparison
from lossgate.judge.pooled_scale import pool_scales, smallest_bias
from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import Output


@dataclass(frozen=True)
class Pooled:
    """One output over the problems of a cell."""

    output: Output
    problems: int
    scale: float
    sd: float
    limit: float

    @property
    def agrees(self) -> bool:
        return abs(self.scale) <= self.limit

    @property
    def mde(self) -> float:
        """The minimum detectable effect: the pool rejects results that are all larger or smaller by
        more than this.
        """
        return self.limit + abs(self.scale)


def pool(output: Output, comparisons: Iterable[Comparison]) -> Pooled:
    """Pools comparisons of one output. Those that say nothing about its scale are left out."""
    used = [c for c in comparisons if c.values and not c.vacuous]
    if not used:
        return Pooled(output, 0, 0.0, inf, inf)
    pooled = pool_scales(
        scales=[c.values[SCALE] for c in used],
        sds=[c.sd for c in used],
        means=[c.mean for c in used],
        limits=[c.limits[SCALE] for c in used],
        floors=[smallest_bias(max(c.unit for c in used), max(c.kernels for c in used))],
        sizes=[len(used)],
    )
    return Pooled(output, len(used), float(pooled.scale[0]), float(pooled.sd[0]), float(pooled.limit[0]))
