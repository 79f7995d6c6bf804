# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of pooling: the scale and the noise of one output over many problems.

The problems' SCALEs are averaged with weights, as a meta-analysis averages the results of studies:
random effects, by DerSimonian and Laird (1986). The between-problem variance stands for rounding
that changes a whole result alike. The ensemble does not show such rounding, and no single
comparison can tell it from a bias.

The noise of a result is in units of the noisiest run of its problem's ensemble. A right kernel is
like one more run, so it is noisier than all M runs in one of M + 1 problems. The pooled noise is
the upper quartile: a quarter of the problems reach it. It is not lower, because a mistake such as a
sum in bfloat16 shows only in problems with much to sum. It is not higher, because right kernels
reach 2.5 in the few problems whose numbers are alike.

The arithmetic needs no torch, and takes any number of pools at once, because a gate redoes the
pools of many cells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

SIGMAS = 5.0
"""Allowed standard deviations of the pooled scale. A pool of few problems is allowed more, because
their scatter is itself uncertain."""

FLOOR = 1 / 64
"""The smallest bias that counts against a kernel, as a share of the output's unit roundoff. The
pools of correct kernels in ``docs/explanation/judge.md`` set it."""

FLOAT32_FLOOR = 2.0**-25
"""The smallest bias that counts against a kernel that computes in float32: approximations of exp
and log are off by that much."""

FEWEST = 8
"""The fewest problems of a pool. The pooled scale of fewer problems says little."""

LARGEST_MDE = 0.01
"""A cell that would not have detected an error of 1% in an output's scale is inconclusive."""


@dataclass(frozen=True)
class PooledScales:
    """The scale of each pool; all ``[pools]``."""

    scale: Floats
    sd: Floats
    limit: Floats


def sigmas(problems: ArrayLike) -> Floats:
    """Returns the allowed standard deviations of the scale, by the number of problems of a pool."""
    count = np.asarray(problems, float)
    return SIGMAS * np.where(count == 1, 1.0, 1 + 60 / count**2)


def smallest_bias(unit: ArrayLike, kernels: ArrayLike) -> Floats:
    """Returns the smallest bias that counts against a kernel.

    Args:
        unit: the unit roundoff of the output's dtype.
        kernels: the number of kernels whose rounding is in the output.
    """
    return np.asarray(kernels, float) * np.maximum(FLOOR * np.asarray(unit, float), FLOAT32_FLOOR)


def pool_scales(
    scales: ArrayLike, sds: ArrayLike, means: ArrayLike, limits: ArrayLike, floors: ArrayLike, sizes: ArrayLike
) -> PooledScales:
    """Pools the scales of problems.

    Args:
        scales: SCALE of each problem, ``[n]``. The problems of a pool stand next to each other.
        sds: the standard deviation of each SCALE over the ensemble, ``[n]``.
        means: the mean of each SCALE over the ensemble, ``[n]``.
        limits: the limit of each SCALE, ``[n]``. It decides a pool of one problem.
        floors: the smallest bias that counts, ``[pools]``.
        sizes: the number of problems of each pool, ``[pools]``; none is 0.
    """
    with np.errstate(all="ignore"):  # a forged file may hold numbers that give NaN
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
    # Rounding itself shifts the scale, because it makes the largest of many numbers larger.
    expected = np.abs(total(weight * mean) / weights)
    allowed = floor + expected + sigmas(size) * sd
    # A pool of one problem has no scatter that shows what rounding did to the whole result alike.
    # So the problem's own limit judges it.
    first = limit[starts] if len(limit) else limit
    return PooledScales(pooled, sd, np.where(size == 1, np.maximum(allowed, first), allowed))


LARGEST, MORE = 1.1, 2.0
"""The limit of the pooled noise of n problems is ``LARGEST + MORE / n``. ``judge.md`` has the pools
of right kernels that set it."""


@dataclass(frozen=True)
class PooledNoise:
    """The noise of an output over the problems of a cell."""

    problems: int
    """Number of problems that say something about the noise."""
    noise: float
    """The pooled noise, in units of the noisiest run of each ensemble."""
    limit: float

    @property
    def agrees(self) -> bool:
        return self.noise <= self.limit


class PooledNoises(NamedTuple):
    """The noise of each pool; all ``[pools]``."""

    problems: NDArray[np.intp]
    """Number of problems that say something about the noise."""
    noise: Floats
    """The pooled noise; 0 for pools of too few problems."""
    limit: Floats
    """The limit of the noise; infinite for pools of too few problems."""


def pool_noise(noises: Sequence[float]) -> PooledNoise | None:
    """Pools the noise of problems, as ``pool_noises`` does; None if there are too few problems."""
    if len(noises) < FEWEST:
        return None
    pool = pool_noises(noises, [len(noises)])
    return PooledNoise(len(noises), float(pool.noise[0]), float(pool.limit[0]))


def pool_noises(noises: ArrayLike, sizes: ArrayLike) -> PooledNoises:
    """Pools the noise of problems.

    Args:
        noises: the noise of each problem, in units of the noisiest run, ``[n]``. The problems of a
            pool stand next to each other. NaN for a problem that says nothing about the noise.
        sizes: the number of problems of each pool, ``[pools]``.
    """
    noise, size = np.asarray(noises, float), np.asarray(sizes, np.intp)
    pool = np.repeat(np.arange(len(size)), size)
    telling = ~np.isnan(noise)
    noise, pool = noise[telling], pool[telling]
    count = np.bincount(pool, minlength=len(size)).astype(np.intp)
    largest_first = noise[np.lexsort((-noise, pool))]  # in each pool
    starts = count.cumsum() - count
    quartile = starts + count // 4
    enough = count >= FEWEST
    pooled, limit = np.zeros(len(size)), np.full(len(size), np.inf)
    pooled[enough] = largest_first[quartile[enough]]
    limit[enough] = LARGEST + MORE / count[enough]
    return PooledNoises(count, pooled, limit)
