# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of pooling noise: is a kernel noisier than it declares, in many problems?

The noise of a result is put in units of the noisiest run of its problem's ensemble. A right kernel
is one more run, so it is noisier than all M runs in one of M + 1 problems. The pooled noise is what
a quarter of the problems reach: an upper quartile, because a mistake such as a sum in bfloat16
shows only where there is much to sum, and because problems whose numbers are alike reach 2.5 in
right kernels, but are few.

It needs no torch, and takes any number of pools at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lossgate.judge.pooled_scale import FEWEST, Floats

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
