# SPDX-License-Identifier: Apache-2.0
"""Counts how close each statistic of an output came to its limit, in bins of equal ratio."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil, inf, log10
from typing import NamedTuple

from lossgate.engine.output_record import OutputRecord

BINS_PER_DECADE = 4
LOWEST, HIGHEST = -3 * BINS_PER_DECADE, 6 * BINS_PER_DECADE
"""The first bin holds zero too, and the last one infinity."""

SCALE = "scale"


class Histogram(NamedTuple):
    """The shares of its limit that a statistic of an output had.

    Bin ``k`` holds the shares over ``10 ** ((k - 1) / BINS_PER_DECADE)``, up to
    ``10 ** (k / BINS_PER_DECADE)``. So bins up to 0 are within the limit, others over it.
    """

    statistic: str
    problems: int
    largest: float | None
    """None if it is infinite."""
    over: int
    """How many were over the limit."""
    first: int
    """The number of the first bin in ``counts``."""
    counts: tuple[int, ...]


def histograms_of(output: OutputRecord) -> Iterator[Histogram]:
    """Yields the histogram of each statistic of an output that was compared."""
    shares = list(_scales(output))
    if shares:
        yield _histogram(SCALE, shares)
    for statistic, found in output.shares.items():
        if found:
            yield _histogram(statistic, [inf if share is None else share for share in found])


def _scales(output: OutputRecord) -> Iterator[float]:
    """Yields the shares of the scale, without problems that say nothing about it."""
    vacuous = frozenset(output.vacuous)
    for i, (scale, limit) in enumerate(zip(output.scale, output.limit, strict=False)):
        if i not in vacuous or abs(scale) > limit:
            yield abs(scale) / limit if limit else (inf if scale else 0.0)


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
