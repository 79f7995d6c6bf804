# SPDX-License-Identifier: Apache-2.0
"""Makes histograms of statistics as shares of their limits, with bins of equal ratio."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil, inf, log10
from typing import NamedTuple

from lossgate.engine.output_record import OutputRecord

BINS_PER_DECADE = 4
"""Bins for shares between a number and ten times that number."""
LOWEST, HIGHEST = -3 * BINS_PER_DECADE, 6 * BINS_PER_DECADE
"""The first and the last bin. The first also holds zero, and the last also infinity."""


class Histogram(NamedTuple):
    """A statistic of an output on all problems, as shares of its limit.

    Bin ``k`` holds the shares over ``10 ** ((k - 1) / BINS_PER_DECADE)`` and up to
    ``10 ** (k / BINS_PER_DECADE)``. So bins up to 0 are within the limit, and later bins over it.
    """

    statistic: str
    problems: int
    largest: float | None
    """The largest share; None if it is infinite."""
    over: int
    """How many shares were over the limit."""
    first: int
    """The number of the first bin in ``counts``."""
    counts: tuple[int, ...]


def histograms_of(output: OutputRecord) -> Iterator[Histogram]:
    """Yields the histogram of each statistic of an output that was compared."""
    shares = list(_scales(output))
    if shares:
        yield _histogram("scale", shares)
    for statistic, found in output.shares.items():
        if found:
            yield _histogram(statistic, [inf if share is None else share for share in found])


def _scales(output: OutputRecord) -> Iterator[float]:
    """Yields the scale on each problem as a share of its limit, unless the problem says nothing."""
    vacuous = frozenset(output.vacuous)
    for i, (scale, limit) in enumerate(zip(output.scale, output.limit, strict=False)):
        if i in vacuous and abs(scale) <= limit:
            continue
        if limit:
            yield abs(scale) / limit
        else:
            yield inf if scale else 0.0


def _histogram(statistic: str, shares: Sequence[float]) -> Histogram:
    bins = Counter(map(_bin, shares))
    first, last, largest = min(bins), max(bins), max(shares)
    return Histogram(
        statistic=statistic,
        problems=len(shares),
        largest=None if largest == inf else float(f"{largest:.3g}"),
        over=sum(share > 1 for share in shares),
        first=first,
        counts=tuple(bins[k] for k in range(first, last + 1)),
    )


def _bin(share: float) -> int:
    if share <= 0:
        return LOWEST
    if share == inf:
        return HIGHEST
    return max(LOWEST, min(HIGHEST, ceil(log10(share) * BINS_PER_DECADE)))
