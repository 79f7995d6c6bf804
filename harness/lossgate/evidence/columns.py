# SPDX-License-Identifier: Apache-2.0
"""The numbers of many records in long columns, for arithmetic on all of them at once: one record at
a time would take a gate ten times longer.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from math import inf, nan
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lossgate.evidence.records import CellRecord, OutputRecord
from lossgate.judge.pooling import Floats, PooledNoises, PooledScales, pool_noises, pool_scales, smallest_bias

ROUNDING = 1e-3
"""Relative error of a number that is explained by the digits that evidence keeps."""


class Columns:
    """The outputs of some records, one after another.

    Outputs whose lists do not fit each other have no numbers here.
    """

    def __init__(self, records: Sequence[CellRecord]) -> None:
        self.outputs = [output for record in records for output in record.outputs]
        self.schemas = [record.schema for record in records for _ in record.outputs]
        """The schema of each output."""
        self.fitting = [_fits(output) for output in self.outputs]
        """Whether the lists of each output have one entry for each comparison."""
        self._good = [output for output, fits in zip(self.outputs, self.fitting, strict=True) if fits]
        self._sizes = np.array([len(output.cases) for output in self._good], np.intp)
        self._scale = self._column(lambda output: output.scale)
        self._limit = self._column(lambda output: output.limit)

    def margins(self) -> list[float]:
        """Returns the largest share of a limit in each output; over 1 is a disagreement. It is
        infinite if its lists do not fit each other.
        """
        largest = iter(np.maximum(self._largest_of_scale(), self._largest_shares()).tolist())
        return [next(largest) if fits else inf for fits in self.fitting]

    def _largest_shares(self) -> Floats:
        """Returns the largest share of the limits of all statistics beside the scale."""
        lists = [shares for output in self._good for shares in output.shares.values()]
        sizes = np.array([sum(map(len, output.shares.values())) for output in self._good], np.intp)
        try:
            shares = np.fromiter(chain.from_iterable(lists), np.float64, int(sizes.sum()))
        except TypeError:  # a share is null
            shares = np.array([inf if share is None else share for one in lists for share in one], np.float64)
        return _largest(shares, sizes)

    def _largest_of_scale(self) -> Floats:
        with np.errstate(all="ignore"):  # 0 / 0 is no share, and 1 / 0 an infinite one
            return _largest(np.nan_to_num(np.abs(self._scale) / self._limit, nan=0.0, posinf=inf), self._sizes)

    def pooled(self) -> tuple[list[int], PooledScales]:
        """Returns how many comparisons of each fitting output say something about its scale, and
        the pools of those outputs of which any does.
        """
        telling = self._telling
        ends = np.concatenate([np.zeros(1, np.intp), telling.cumsum()])
        sizes = np.diff(ends[np.concatenate([np.zeros(1, np.intp), self._sizes.cumsum()])])
        used = [output for output, size in zip(self._good, sizes.tolist(), strict=True) if size]
        pools = pool_scales(
            scales=self._scale[telling],
            sds=self._column(lambda output: output.sd)[telling],
            means=self._column(lambda output: output.mean)[telling],
            limits=self._limit[telling],
            floors=smallest_bias([output.unit for output in used], [output.kernels for output in used]),
            sizes=sizes[sizes > 0],
        )
        return sizes.tolist(), pools

    def pooled_noise(self) -> PooledNoises:
        """Returns the pooled noise of each fitting output."""
        noises = np.full(len(self._scale), nan)
        for start, output in zip(_starts(self._sizes).tolist(), self._good, strict=True):
            if output.noise is not None:
                noises[start : start + len(output.noise)] = [nan if one is None else one for one in output.noise]
        return pool_noises(np.where(self._telling, noises, nan), self._sizes)

    def wrong_silence(self) -> list[bool]:
        """Returns for each fitting output whether ``silent`` names others than its limits do.

        A limit fits both if its digits may hide on which side of 1 it was.
        """
        explains_zero = ~self._listed(lambda output: output.vacuous) & ~(self._limit < 1)
        wrong = (self._silent != explains_zero) & ~(np.abs(self._limit - 1) <= ROUNDING)
        return (_largest(wrong.astype(np.float64), self._sizes) > 0).tolist()

    @cached_property
    def _telling(self) -> NDArray[np.bool_]:
        """Which comparisons say something about the scale and the noise of their output."""
        return ~(self._listed(lambda output: output.vacuous) | self._silent)

    @cached_property
    def _silent(self) -> NDArray[np.bool_]:
        return self._listed(lambda output: output.silent)

    def _listed(self, entries: Callable[[OutputRecord], tuple[int, ...]]) -> NDArray[np.bool_]:
        """Returns which comparisons a list of entries names."""
        listed = np.zeros(len(self._scale), bool)
        for start, output in zip(_starts(self._sizes).tolist(), self._good, strict=True):
            for entry in entries(output):
                listed[start + entry] = True
        return listed

    def _column(self, numbers: Callable[[OutputRecord], tuple[float, ...]]) -> Floats:
        return np.fromiter(chain.from_iterable(map(numbers, self._good)), np.float64, int(self._sizes.sum()))


def _starts(sizes: NDArray[np.intp]) -> NDArray[np.intp]:
    return sizes.cumsum() - sizes


def _largest(values: Floats, sizes: NDArray[np.intp]) -> Floats:
    """Returns the largest value of each part, and 0 for parts of size 0."""
    largest = np.zeros(len(sizes))
    some = sizes > 0
    if some.any():
        largest[some] = np.maximum.reduceat(values, _starts(sizes)[some])
    return largest


def largest_share(shares: Sequence[float | None]) -> float:
    """Returns the largest of a statistic's shares of its limit; 0 if there are none.

    A share that is over a limit of zero, which evidence writes as null, is infinite.
    """
    if not shares:
        return 0.0
    return inf if None in shares else max(cast("Sequence[float]", shares))


def _fits(output: OutputRecord) -> bool:
    count = len(output.cases)
    noise = () if output.noise is None else (output.noise,)
    lists = (output.scale, output.limit, output.sd, output.mean, *noise, *output.shares.values())
    return {count, *map(len, lists)} == {count} and max((*output.vacuous, *output.silent), default=-1) < count
