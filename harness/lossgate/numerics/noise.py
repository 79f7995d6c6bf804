# SPDX-License-Identifier: Apache-2.0
"""Draws random errors as large as those of rounding (Monte Carlo arithmetic)."""

from functools import cache
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from lossgate.numerics.float_formats import FloatFormat

_EXPONENT = 0x7FF << 52
"""The bits of a float64 that hold its exponent. These bits alone are the power of two at or below
the number."""

_POOL = 1 << 21
"""The number of random numbers that are kept ready. Noise is read from this pool at a random
offset, because to draw new numbers would cost more than all other work of the judge."""


@cache
def _pool() -> Tensor:
    """Returns the pool, uniform in [-1, 1)."""
    words = np.random.Philox(key=1).random_raw(_POOL) >> np.uint64(11)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-52 - 1)


def power_of_two(x: Tensor) -> Tensor:
    """Returns the power of two at or below the size of each float64 number; 0 for 0."""
    return x.contiguous().view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)


class Noise:
    """Draws rounding errors: Monte Carlo arithmetic (Parker 1997) with a seed of its own.

    Each number x becomes x + e. For float32, e is uniform in +-ulp(x) / sqrt(2). That is twice the
    variance of rounding to nearest, because a kernel may round more often than the reference. For
    coarser formats, e is uniform in +-ulp(x) / 2.

    Stochastic rounding has the variance of the float32 errors on average. But it gives almost no
    noise to a number that happens to lie near a representable one. A correct kernel that sums in
    another order would exceed such noise, and a dozen members are too few to show that it may.
    """

    def __init__(self, seed: int) -> None:
        self._offsets = np.random.Generator(np.random.Philox(key=seed))

    def uniform(self, shape: torch.Size) -> Tensor:
        """Returns float64 numbers in [-1, 1).

        Do not write to them: they may share memory with the pool.
        """
        count = shape.numel()
        if count > _POOL // 2:
            return torch.from_numpy(self._offsets.uniform(-1, 1, count)).view(shape)
        start = int(self._offsets.integers(0, _POOL - count))
        return _pool()[start : start + count].view(shape)

    def round(self, x: Tensor, to: FloatFormat, *, near_zero: bool = True) -> Tensor:
        """Returns ``x`` with an error as large as that of rounding it to a format; zeros stay zero.

        Args:
            x: float64 numbers of any shape.
            to: the format.
            near_zero: whether to add the errors of numbers below the smallest normal one, too. Turn
                it off if these cannot matter.
        """
        power = power_of_two(x)
        if near_zero:
            power.add_(power.sign(), alpha=to.spacing / (2 * to.unit))
        return torch.addcmul(x, power, self.uniform(x.shape), value=to.unit * (sqrt(2) if to.bits == 24 else 1.0))
