# SPDX-License-Identifier: Apache-2.0
"""The noise of each entry of an output, from an ensemble of correct runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lossgate.judge.rows import Rows, Stack, some_rows, stack_of

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
