# SPDX-License-Identifier: Apache-2.0
"""The noise of each entry of an output, and the limit of each statistic, from correct runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lossgate.judge.rows import Rows, Stack, some_rows, stack_of
from lossgate.judge.statistics import NOISE, SCALE, WORST, Blocks, Statistic, statistics

_TINY = 1e-200
"""Squares below this are taken for zero; results are scaled so that the largest is 1."""


@dataclass(frozen=True)
class NoiseModel:
    """The deviations of an ensemble of correct runs in one output."""

    reference: Tensor
    deviations: Tensor
    """``[M, *shape]``: each member minus the reference, times ``size``."""
    rounding: Callable[[Rows], Tensor]
    """Some rows of the most that rounding the output itself changes each entry, ``[rows, ...]``."""
    size: float = 1.0
    """What reference and rounding are divided by already."""

    @property
    def members(self) -> int:
        return len(self.deviations)

    @property
    def says_something(self) -> bool:
        """Whether the reference is not zero, nor so far below its noise that its square is."""
        return float(self.reference.abs().max()) ** 2 >= _TINY

    def of_members(self, rows: Rows) -> Tensor:
        """Returns some rows of the deviations, ``[M, rows, ...]``."""
        runs = stack_of(self.deviations)(rows)
        return runs if self.size == 1.0 else runs / self.size

    def precision(self, rows: Rows) -> Tensor:
        """Returns 1 / s^2 from every member, ``[1, rows, ...]``; 0 where there is no noise at
        all.
        """
        return self._precision(rows, self._squares, self.members)

    def precision_without_each(self, rows: Rows) -> Tensor:
        """Returns 1 / s^2 for each member from all others, ``[M, rows, ...]``.

        No member is judged by noise that it helped to make.
        """
        return self._precision(rows, self._squares_of_others, max(self.members - 1, 1))

    def _precision(self, rows: Rows, squares: Stack, members: int) -> Tensor:
        variance = (self.rounding(rows).square() / 3).add(squares(rows), alpha=1 / members)
        return variance.masked_fill_(variance < _TINY, float("inf")).reciprocal_()

    @cached_property
    def _squares(self) -> Stack:
        """The sums of squares over the members, ``[1, rows, ...]``."""
        if self.reference.dim() == 2:
            return _pooled(*(sums.sum(0, keepdim=True) for sums in self._sums))
        return stack_of(self.of_members(slice(None)).square().sum(0, keepdim=True))

    @cached_property
    def _squares_of_others(self) -> Stack:
        """The same over all members but one, ``[M, rows, ...]``."""
        if self.reference.dim() == 2:
            return _pooled(*(sums.sum(0, keepdim=True) - sums for sums in self._sums))
        squares = self.of_members(slice(None)).square()
        return stack_of(squares.sum(0) - squares)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """The sums of each member's squares over the columns of a matrix, ``[M, rows]``, and over
        its rows, ``[M, columns]``.
        """
        by_row = self.reference.new_zeros(self.members, self.reference.shape[0])
        by_column = self.reference.new_zeros(self.members, self.reference.shape[1])
        for rows in some_rows(self.reference.shape):
            squares = self.of_members(rows).square()
            by_row[:, rows] = squares.sum(2)
            by_column += squares.sum(1)
        return by_row, by_column


def _pooled(by_row: Tensor, by_column: Tensor) -> Stack:
    """Returns squares of a matrix that are a product of row mean and column mean.

    Args:
        by_row: ``[n, rows]``, sums over the columns.
        by_column: ``[n, columns]``, sums over the rows.
    """
    of_row, of_column = by_row / by_column.shape[1], by_column / by_row.shape[1]
    of_row = of_row / of_row.mean(1, keepdim=True).clamp(min=_TINY)
    return lambda rows: of_row[:, rows, None] * of_column[:, None]


FACTORS: Mapping[str, float] = {NOISE: 2.5, WORST: 3.0}
BLOCK_FACTOR = 3.0
"""Limits: these factors of the largest value among the members. With them, and ``scale_sigmas``, no
correct kernel of ``benchmarks/calibration.py`` is rejected; ``judge.md`` has its figures."""

ALIKE_FACTOR = 1.5
"""What a kernel may deviate by is at least this factor of what the runs do that round equal numbers
alike: it does nearly what one of them does."""


@dataclass(frozen=True)
class Limits:
    """What the ensemble says of each statistic."""

    of: Mapping[str, float]
    """The limit of each statistic."""
    sd: float
    """Root mean square of SCALE over the members."""
    mean: float
    """Mean of SCALE over the members."""
    noise: float
    """The largest NOISE of the runs, of those that round equal numbers alike, and of the rounded
    reference; for a number, the largest abs(SCALE)."""


def limits(model: NoiseModel, blocks: Sequence[Blocks], allowed: float, alike: Stack, rounded: Stack) -> Limits:
    """Returns the limit of each statistic.

    Args:
        model: of the noise.
        blocks: the ways to cut the output into blocks.
        allowed: what rounding may do to the whole output alike, relative to it.
        alike: ``[n, *shape]``, the deviations of runs that round equal numbers alike.
        rounded: ``[1, *shape]``, the deviation of the reference as the output's dtype holds it.
    """
    members = statistics(model.of_members, model.reference, model.precision_without_each, blocks)
    sd = float(members[SCALE].values.square().mean().sqrt())
    limit = {
        name: FACTORS.get(name, BLOCK_FACTOR) * float(statistic.values.max()) for name, statistic in members.items()
    }
    of_alike = statistics(alike, model.reference, model.precision, ())
    for name, statistic in of_alike.items():
        limit[name] = max(limit[name], ALIKE_FACTOR * float(statistic.values.max()))
    limit[SCALE] = allowed + scale_sigmas(model.members) * sd
    of_rounded = statistics(rounded, model.reference, model.precision, ())
    noise = max(float(noise_of(runs).max()) for runs in (members, of_alike, of_rounded))
    return Limits(limit, sd, float(members[SCALE].values.mean()), noise)


def noise_of(found: Mapping[str, Statistic]) -> Tensor:
    """Returns how noisy each result is, ``[n]``. A number has SCALE alone."""
    return found[NOISE].values if NOISE in found else found[SCALE].values.abs()


def scale_sigmas(members: int) -> float:
    """Returns how many standard deviations of SCALE are allowed: five, and more for few members.

    The standard deviation is itself estimated. With twelve members or more, the result is within a
    tenth of the quantile of Student's t at 1e-6, and with fewer it is that quantile.
    """
    return _QUANTILES.get(members, 5 * (1 + 8 / members))


_QUANTILES = dict(enumerate((636_620, 1000, 130.2, 49.5, 28.5, 20.1, 15.8, 13.3, 11.7, 10.6, 9.7), 1))
"""Those of Student's t at 1e-6, by the degrees of freedom."""
