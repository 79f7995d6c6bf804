# SPDX-License-Identifier: Apache-2.0
"""The scale of an output over many problems: errors too small for one comparison, such as a bias of 0.2% in bf16.

The problems' SCALEs are averaged with weights, as results of studies are in a meta-analysis: random effects, by
DerSimonian and Laird (1986). The between-problem variance is what rounding does to a whole result alike, which the
ensemble does not show and no single comparison can tell from a bias.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, sqrt

from lossgate.judge.comparison import Comparison
from lossgate.judge.statistics import SCALE

SIGMAS = 5.0
"""Of the pooled scale; more for few problems, whose scatter tells little of the scatter that there is."""

FLOOR = 1 / 64
"""Of the output's unit roundoff: the smallest bias that is held against a kernel. See ``docs/judge.md`` for the pools of
correct kernels that set it."""

FLOAT32_FLOOR = 2.0**-25
"""Kernels compute in float32 at the best, with approximations of exp and log that are off by that much."""


@dataclass(frozen=True)
class Pooled:
    """One output over the problems of a cell."""

    output: str
    problems: int
    scale: float
    sd: float
    limit: float

    @property
    def agrees(self) -> bool:
        return abs(self.scale) <= self.limit

    @property
    def mde(self) -> float:
        """The minimum detectable effect: had every result been larger or smaller by more than this, the pool would have been rejected."""
        return self.limit + abs(self.scale)


def pool(output: str, comparisons: Iterable[Comparison]) -> Pooled:
    """Pool comparisons of one output; those that could say nothing of its scale are left out."""
    used = [c for c in comparisons if c.values and not c.vacuous]
    if not used:
        return Pooled(output, 0, 0.0, inf, inf)
    floor = max(FLOOR * max(c.unit for c in used), FLOAT32_FLOOR)
    scales, variances = [c.values[SCALE] for c in used], [c.sd**2 + floor**2 for c in used]
    between = _between_variance(scales, variances)
    weights = [1 / (v + between) for v in variances]
    scale = sum(w * s for w, s in zip(weights, scales, strict=True)) / sum(weights)
    sd = 1 / sqrt(sum(weights))
    if len(used) == 1:  # nothing tells what rounding did to all of it alike: it is judged by its own limit
        return Pooled(output, 1, scale, sd, max(floor + SIGMAS * sd, used[0].limits[SCALE]))
    return Pooled(output, len(used), scale, sd, floor + SIGMAS * (1 + 60 / len(used) ** 2) * sd)


def _between_variance(scales: list[float], variances: list[float]) -> float:
    weights = [1 / v for v in variances]
    total = sum(weights)
    mean = sum(w * s for w, s in zip(weights, scales, strict=True)) / total
    q = sum(w * (s - mean) ** 2 for w, s in zip(weights, scales, strict=True))
    c = total - sum(w * w for w in weights) / total
    return max(0.0, (q - (len(scales) - 1)) / c) if c > 0 else 0.0
