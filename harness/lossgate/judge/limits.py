# SPDX-License-Identifier: Apache-2.0
"""Derives the noise of each entry, and the limit of each statistic, from correct runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lossgate.judge.rows import Rows, Stack, some_rows, stack_of
from lossgate.judge.statistics import NOISE, SCALE, WORST, Blocks, Statistic, statistics

_TINY = 1e-200
"""Squares below this count as zero. Results are scaled so that the largest is 1."""


@dataclass(frozen=True)
class NoiseModel:
    """The noise of each entry of one output, from the deviations of an ensemble of correct runs.

    M is the number of members, and s the noise of an entry.
    """

    reference: Tensor
    """``[*shape]``, already divided by ``size``."""
    deviations: Tensor
    """``[M, *shape]``: each member minus the reference, not yet divided by ``size``."""
    rounding: Callable[[Rows], Tensor]
    """Returns, for some rows, the most by which rounding the output itself changes each entry,
    ``[rows, ...]``, already divided by ``size``."""
    size: float = 1.0

    @property
    def members(self) -> int:
        return len(self.deviations)

    @property
    def says_something(self) -> bool:
        """Whether the reference is neither zero nor so small next to its noise that its square
        counts as zero.
        """
        return float(self.reference.abs().max()) ** 2 >= _TINY

    def of_members(self, rows: Rows) -> Tensor:
        """Returns some rows of the deviations, ``[M, rows, ...]``."""
        runs = stack_of(self.deviations)(rows)
        return runs if self.size == 1.0 else runs / self.size

    def precision(self, rows: Rows) -> Tensor:
        """Returns 1 / s^2 from all members, ``[1, rows, ...]``; 0 where there is no noise."""
        return self._precision(rows, self._squares, self.members)

    def precision_without_each(self, rows: Rows) -> Tensor:
        """Returns 1 / s^2 for each member, computed from all other members, ``[M, rows, ...]``.

        So no member is judged by noise to which it contributed.
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
        """For each member, the sums of squares over all other members, ``[M, rows, ...]``."""
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
    """Returns the squares of a matrix, pooled: each is the product of a row mean and a column mean.

    Args:
        by_row: ``[n, rows]``, sums over the columns.
        by_column: ``[n, columns]``, sums over the rows.
    """
    of_row, of_column = by_row / by_column.shape[1], by_column / by_row.shape[1]
    of_row = of_row / of_row.mean(1, keepdim=True).clamp(min=_TINY)
    return lambda rows: of_row[:, rows, None] * of_column[:, None]


FACTORS: Mapping[str, float] = {NOISE: 2.5, WORST: 3.0}
BLOCK_FACTOR = 3.0
"""A limit is this factor times the largest value among the members. With these factors, and
``scale_sigmas``, no correct kernel of ``benchmarks/calibration.py`` is rejected; ``judge.md`` has
the figures."""

ALIKE_FACTOR = 1.5
"""A limit is at least this factor times the value of the runs that round equal numbers alike,
because a kernel does nearly the same as one of these runs."""


@dataclass(frozen=True)
class Limits:
    """The limit of each statistic of an output, and the noise of its runs."""

    of: Mapping[str, float]
    """The limit of each statistic."""
    sd: float
    """Root mean square of SCALE over the members."""
    mean: float
    """Mean of SCALE over the members."""
    noise: float
    """The largest NOISE among the members, the runs that round equal numbers alike, and the rounded
    reference. For a number, it is the largest abs(SCALE) among them."""


def limits(model: NoiseModel, blocks: Sequence[Blocks], allowed: float, alike: Stack, rounded: Stack) -> Limits:
    """Returns the limit of each statistic.

    Args:
        model: the noise of the output.
        blocks: the ways to cut the output into blocks.
        allowed: the relative change that rounding may make to the whole output alike.
        alike: ``[n, *shape]``, the deviations of runs that round equal numbers alike.
        rounded: ``[1, *shape]``, the deviation of the reference that is rounded to the output's
            dtype.
    """
    members = statistics(model.of_members, model.reference, model.precision_without_each, blocks)
    of_alike = statistics(alike, model.reference, model.precision, ())
    limit: dict[str, float] = {}
    for name, statistic in members.items():
        limit[name] = FACTORS.get(name, BLOCK_FACTOR) * float(statistic.values.max())
    for name, statistic in of_alike.items():
        limit[name] = max(limit[name], ALIKE_FACTOR * float(statistic.values.max()))
    sd = float(members[SCALE].values.square().mean().sqrt())
    limit[SCALE] = allowed + scale_sigmas(model.members) * sd
    of_rounded = statistics(rounded, model.reference, model.precision, ())
    noise = max(float(noise_of(runs).max()) for runs in (members, of_alike, of_rounded))
    return Limits(limit, sd, float(members[SCALE].values.mean()), noise)


def noise_of(found: Mapping[str, Statistic]) -> Tensor:
    """Returns the noise of each result, ``[n]``: NOISE, or abs(SCALE) for a number."""
    return found[NOISE].values if NOISE in found else found[SCALE].values.abs()


def scale_sigmas(members: int) -> float:
    """Returns the allowed standard deviations of SCALE: five, and more for few members.

    More are allowed because the standard deviation is itself estimated. With fewer than twelve
    members, the number is the quantile of Student's t at 1e-6. With more, it is within a tenth of
    that quantile.
    """
    return _QUANTILES.get(members, 5 * (1 + 8 / members))


_QUANTILES = dict(enumerate((636_620, 1000, 130.2, 49.5, 28.5, 20.1, 15.8, 13.3, 11.7, 10.6, 9.7), 1))
"""Quantiles of Student's t at 1e-6, by the degrees of freedom."""
