# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of pooling: what many problems say of one output together.

The problems' SCALEs are averaged with weights, as results of studies are in a meta-analysis: random
effects, by DerSimonian and Laird (1986). The between-problem variance is what rounding does to a
whole result alike, which the ensemble does not show and no single comparison can tell from a bias.

The noise of a result is put in units of the noisiest run of its problem's ensemble. A right kernel
is one more run, so it is noisier than all M runs in one of M + 1 problems. The pooled noise is what
a quarter of the problems reach: an upper quartile, because a mistake such as a sum in bfloat16
shows only where there is much to sum, and because problems whose numbers are alike reach 2.5 in
right kernels, but are few.

The arithmetic needs no torch, and takes any number of pools at once: a gate redoes those of many
cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

SIGMAS = 5.0
"""Standard deviations of the pooled scale that are allowed. Few problems get more, because their
scatter is itself uncertain."""

FLOOR = 1 / 64
"""The smallest bias that counts against a kernel, as a share of the output's unit roundoff. The
pools of correct kernels in ``docs/explanation/judge.md`` set it."""

FLOAT32_FLOOR = 2.0**-25
"""The same for kernels that compute in float32: their approximations of exp and log are off by that
much."""

FEWEST = 8
"""The fewest problems of which a pool says something: the pooled scale of fewer says little."""

LARGEST_MDE = 0.01
"""A cell that would not have detected an error of 1% in an output's scale is inconclusive."""


@dataclass(frozen=True)
class PooledScales:
    """The scale of each pool; all ``[pools]``."""

    scale: Floats
    sd: Floats
    limit: Floats


def sigmas(problems: ArrayLike) -> Floats:
    """Returns how many standard deviations a pool of so many problems is allowed."""
    count = np.asarray(problems, float)
    return SIGMAS * np.where(count == 1, 1.0, 1 + 60 / count**2)


def smallest_bias(unit: ArrayLike, kernels: ArrayLike) -> Floats:
    """Returns the smallest bias that counts, for outputs of a unit roundoff.

    Args:
        unit: the unit roundoff of the output's dtype.
        kernels: how many kernels' rounding is in it.
    """
    return np.asarray(kernels, float) * np.maximum(FLOOR * np.asarray(unit, float), FLOAT32_FLOOR)


def pool_scales(
    scales: ArrayLike, sds: ArrayLike, means: ArrayLike, limits: ArrayLike, floors: ArrayLike, sizes: ArrayLike
) -> PooledScales:
    """Pools the scales of problems.

    Args:
        scales: SCALE of each problem, ``[n]``, those of one pool next to each other.
        sds: its standard deviation over the ensemble, ``[n]``.
        means: its mean over the ensemble, ``[n]``.
        limits: its limit, ``[n]``, which decides a pool of one problem.
        floors: the smallest bias that counts, ``[pools]``.
        sizes: the number of problems of each pool, ``[pools]``; none is 0.
    """
    with np.errstate(all="ignore"):  # numbers of a forged file may give no number
        return _pool_scales(scales, sds, means, limits, floors, np.asarray(sizes, np.intp))


def _pool_scales(
    scales: ArrayLike, sds: ArrayLike, means: ArrayLike, limits: ArrayLike, floors: ArrayLike, size: NDArray[np.intp]
) -> PooledScales:
    scale, mean, limit = np.asarray(scales, float), np.asarray(means, float), np.asarray(limits, float)
    floor = np.asarray(floors, float)
    starts = np.concatenate([[0], size.cumsum()[:-1]]).astype(np.intp)

    def total(values: Floats) -> Floats:
        return np.add.reduceat(values, starts) if len(values) else np.zeros(0)

    variance = np.square(np.asarray(sds, float)) + np.repeat(floor**2, size)
    weight = 1 / variance
    weights = total(weight)
    deviation = scale - np.repeat(total(weight * scale) / weights, size)
    q = total(weight * deviation**2)
    c = weights - total(weight * weight) / weights
    between = np.where(c > 0, np.maximum(0.0, (q - (size - 1)) / c), 0.0)
    weight = 1 / (variance + np.repeat(between, size))
    weights = total(weight)
    pooled, sd = total(weight * scale) / weights, 1 / np.sqrt(weights)
    # What rounding itself does to the scale: it makes the largest of many numbers larger.
    expected = np.abs(total(weight * mean) / weights)
    allowed = floor + expected + sigmas(size) * sd
    # Nothing tells what rounding did to all of a single problem alike: its own limit judges it.
    first = limit[starts] if len(limit) else limit
    return PooledScales(pooled, sd, np.where(size == 1, np.maximum(allowed, first), allowed))


LARGEST, MORE = 1.1, 2.0
"""The limit of n problems is ``LARGEST + MORE / n``. ``judge.md`` has the pools of right
kernels that set it."""


@dataclass(frozen=True)
class PooledNoise:
    """The noise of an output over the problems of a cell."""

    problems: int
    """How many problems say something about it."""
    noise: float
    """In units of the noisiest run of each ensemble."""
    limit: float

    @property
    def agrees(self) -> bool:
        return self.noise <= self.limit


class PooledNoises(NamedTuple):
    """The noise of each pool; all ``[pools]``."""

    problems: NDArray[np.intp]
    """How many problems say something about the noise."""
    noise: Floats
    """0 for pools of too few problems."""
    limit: Floats
    """Infinite for pools of too few problems."""


def pool_noise(noises: Sequence[float]) -> PooledNoise | None:
    """Pools the noise of problems, as ``pool_noises`` does; None if they are too few."""
    pool = pool_noises(noises, [len(noises)])
    enough = len(noises) >= FEWEST
    return PooledNoise(len(noises), float(pool.noise[0]), float(pool.limit[0])) if enough else None


def pool_noises(noises: ArrayLike, sizes: ArrayLike) -> PooledNoises:
    """Pools the noise of problems.

    Args:
        noises: of each problem, in units of the noisiest run, ``[n]``, those of one pool next to
            each other. NaN for a problem that says nothing about it.
        sizes: the number of problems of each pool, ``[pools]``.
    """
    noise, size = np.asarray(noises, float), np.asarray(sizes, np.intp)
    pool = np.repeat(np.arange(len(size)), size)
    telling = ~np.isnan(noise)
    noise, pool = noise[telling], pool[telling]
    count = np.bincount(pool, minlength=len(size)).astype(np.intp)
    largest_first = noise[np.lexsort((-noise, pool))]
    enough = count >= FEWEST
    quartile = (count.cumsum() - count + count // 4)[enough]
    pooled, limit = np.zeros(len(size)), np.full(len(size), np.inf)
    pooled[enough] = largest_first[quartile]
    limit[enough] = LARGEST + MORE / count[enough]
    return PooledNoises(count, pooled, limit)
