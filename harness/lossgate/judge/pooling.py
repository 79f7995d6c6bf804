# SPDX-License-Identifier: Apache-2.0
"""The scale of an output over many problems: errors too small for one comparison, such as a bias of
0.2% in bf16.

The problems' SCALEs are averaged with weights, as results of studies are in a meta-analysis: random
effects, by DerSimonian and Laird (1986). The between-problem variance is what rounding does to a
whole result alike, which the ensemble does not show and no single comparison can tell from a bias.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt

from lossgate.judge.comparison import Comparison
from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import Output

SIGMAS = 5.0
"""Standard deviations of the pooled scale that are allowed. Few problems get more, because their
scatter is itself uncertain."""

FLOOR = 1 / 64
"""The smallest bias that counts against a kernel, as a share of the output's unit roundoff. The
pools of correct kernels in ``docs/judge.md`` set it."""

FLOAT32_FLOOR = 2.0**-25
"""The same for kernels that compute in float32: their approximations of exp and log are off by that
much."""


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
    floor = max(c.kernels for c in used) * max(FLOOR * max(c.unit for c in used), FLOAT32_FLOOR)
    scales, variances = [c.values[SCALE] for c in used], [c.sd**2 + floor**2 for c in used]
    between = _between_variance(scales, variances)
    weights = [1 / (v + between) for v in variances]
    scale = sum(w * s for w, s in zip(weights, scales, strict=True)) / sum(weights)
    sd = 1 / sqrt(sum(weights))
    # What rounding itself does to the scale: it makes the largest of many numbers larger.
    expected = abs(sum(w * c.mean for w, c in zip(weights, used, strict=True)) / sum(weights))
    if len(used) == 1:  # nothing tells what rounding did to all of it alike: it is judged by its own limit
        return Pooled(output, 1, scale, sd, max(floor + expected + SIGMAS * sd, used[0].limits[SCALE]))
    return Pooled(output, len(used), scale, sd, floor + expected + SIGMAS * (1 + 60 / len(used) ** 2) * sd)


def _between_variance(scales: list[float], variances: list[float]) -> float:
    weights = [1 / v for v in variances]
    total = sum(weights)
    mean = sum(w * s for w, s in zip(weights, scales, strict=True)) / total
    q = sum(w * (s - mean) ** 2 for w, s in zip(weights, scales, strict=True))
    c = total - sum(w * w for w in weights) / total
    return max(0.0, (q - (len(scales) - 1)) / c) if c > 0 else 0.0
