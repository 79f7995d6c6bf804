# SPDX-License-Identifier: Apache-2.0
"""Floating-point grids, and random rounding of float64 numbers as if to them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """A binary format: ``bits`` of significand with the hidden one, smallest normal number ``2 ** min_exponent``."""

    bits: int
    min_exponent: int
    flushes: bool
    """Hardware may take numbers below the smallest normal one for zero."""

    @property
    def unit(self) -> float:
        """Unit roundoff u: rounding to nearest is off by at most u times the value."""
        return 2.0**-self.bits

    @property
    def spacing(self) -> float:
        """Distance of neighbours below the smallest normal number, as far as can be relied on."""
        return 2.0 ** (self.min_exponent if self.flushes else self.min_exponent + 1 - self.bits)


GRIDS: Mapping[str, Grid] = MappingProxyType(
    {"float32": Grid(24, -126, True), "bfloat16": Grid(8, -126, True), "float16": Grid(11, -14, False)}
)
FLOAT32 = GRIDS["float32"]


def grid_of(dtype: torch.dtype) -> Grid:
    return GRIDS[str(dtype).removeprefix("torch.")]


_EXPONENT = 0x7FF << 52
"""The bits of a float64 that hold its exponent: kept alone, they are the power of two below it."""

_POOL = 1 << 21
"""Random numbers kept ready. Noise is taken from a random place in the pool: making it afresh would cost more than all else."""


@cache
def _pool() -> Tensor:
    """Uniform in [-1, 1)."""
    words = np.random.Philox(key=1).random_raw(_POOL) >> np.uint64(11)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-52 - 1)


class Noise:
    """Monte Carlo arithmetic (Parker 1997) with a seed of its own: random errors as large as those of rounding.

    Each number x becomes x + e, e uniform in +-ulp(x) / sqrt(2): the variance that stochastic rounding has on average,
    twice that of rounding to nearest. Stochastic rounding itself gives a number that happens to lie near the grid
    almost no noise, which a correct kernel that sums in another order then exceeds: a dozen members are too few to see
    that it could.
    """

    def __init__(self, seed: int) -> None:
        self._places = np.random.Generator(np.random.Philox(key=seed))

    def uniform(self, shape: torch.Size) -> Tensor:
        """Float64 in [-1, 1). Don't write to it."""
        count = shape.numel()
        if count > _POOL // 2:
            return torch.from_numpy(self._places.uniform(-1, 1, count)).view(shape)
        start = int(self._places.integers(0, _POOL - count))
        return _pool()[start : start + count].view(shape)

    def round(self, x: Tensor, grid: Grid, *, near_zero: bool = True) -> Tensor:
        """``x`` with the error of rounding to ``grid``; zeros stay zero.

        ``near_zero=False`` leaves out what happens below the smallest normal number, where that can't matter.
        """
        power = x.contiguous().view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
        if near_zero:
            power.add_(power.sign(), alpha=grid.spacing / (2 * grid.unit))
        return torch.addcmul(x, power, self.uniform(x.shape), value=grid.unit * (sqrt(2) if grid.bits == 24 else 1.0))
