# SPDX-License-Identifier: Apache-2.0
"""Rounding that treats equal numbers alike, as that of a kernel does.

The members of an ensemble round each number for itself, so that errors of many tokens average out.
Those of tokens with equal log-probabilities do not: each of them is off by the same. So a problem
has runs, too, in which a number is rounded to a grid as fine as the format. Equal numbers, and
nearly equal ones, then have equal errors. The first run has the numbers of the format, as a kernel
has. In the other they lie halfway between, as for a kernel that rounds half, or twice, the number.
"""

import torch
from torch import Tensor

from lossgate.numerics.float_formats import FLOAT32, FloatFormat
from lossgate.numerics.noise import Noise, power_of_two
from lossgate.numerics.rounded_arithmetic import Stages

PHASES = (0.0, 0.5)
"""Where the numbers of a run's grid lie, as shares of their distance."""


class OnGrid(Noise):
    """Rounds to a grid as fine as the format, and makes no other errors."""

    def __init__(self, phase: float) -> None:
        """Prepares a run.

        Args:
            phase: where the numbers of the grid lie, as a share of their distance.
        """
        super().__init__(0)
        self._phase = phase

    def uniform(self, shape: torch.Size) -> Tensor:
        """Returns zeros."""
        return torch.zeros((), dtype=torch.float64).expand(shape)

    def round(self, x: Tensor, to: FloatFormat, *, near_zero: bool = True) -> Tensor:
        """Returns numbers of the grid; what is not finite, and all float32, as it is."""
        if to == FLOAT32:
            return x
        distance = (power_of_two(x) * (2 * to.unit)).clamp_(min=to.spacing)
        return torch.where(x.isfinite(), ((x / distance + self._phase).round() - self._phase) * distance, x)


def rounds_coarsely(stages: Stages) -> bool:
    """Returns whether a kernel rounds to a coarser format than float32 before it returns."""
    return any(
        isinstance(stage, FloatFormat) and stage != FLOAT32 for name, stage in vars(stages).items() if name != "inputs"
    )
