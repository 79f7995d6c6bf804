# SPDX-License-Identifier: Apache-2.0
"""The record of one output of a cell: the numbers from which the verdict follows, as data."""

from math import inf
from typing import Annotated, cast

from msgspec import Meta, Struct, field

Count = Annotated[int, Meta(ge=0, le=2**53)]
Size = Annotated[float, Meta(ge=0)]
"""A number that is not negative."""


class PooledNoiseRecord(Struct, frozen=True, kw_only=True):
    """The noise of an output, pooled over the problems that say something about it."""

    problems: Count
    noise: Size
    """The noise that a quarter of the problems reach, in units of the noisiest correct run of each
    problem."""
    limit: Size


class PooledRecord(Struct, frozen=True, kw_only=True):
    """The scale and noise of an output, pooled over the problems that say something about them."""

    problems: Count
    scale: float
    """The error in the size of the output, relative to the reference. It is positive if the output
    is too large."""
    limit: Size
    """The largest ``scale`` that rounding explains, on either side of 0."""
    noise: PooledNoiseRecord | None = None
    """Null if too few problems say something about the noise."""

    @property
    def mde(self) -> float:
        """The minimum detectable effect."""
        return self.limit + abs(self.scale)

    @property
    def agrees(self) -> bool:
        return abs(self.scale) <= self.limit and (self.noise is None or self.noise.noise <= self.noise.limit)


class OutputRecord(Struct, frozen=True, kw_only=True):
    """The comparisons of one output of a cell.

    ``cases``, ``scale``, ``limit``, ``sd``, ``mean``, ``noise`` and the lists in ``shares`` have
    one entry for each comparison.
    """

    name: str
    """``loss``, ``logprobs``, ``token_entropy``, a metric, or ``grad of`` an input."""
    metric: bool
    """Whether it is a metric. A metric may be zero on every problem, such as the share of tokens
    that are clipped."""
    cases: tuple[Count, ...] = ()
    """The number of each problem on which it was compared."""
    without_numbers: tuple[Count, ...] = ()
    """The number of each problem without such numbers. There the output is exactly zero in every
    correct run, or it is not finite, which is a fault."""
    scale: tuple[float, ...] = ()
    """The error in the size of the output, relative to the reference. It is positive if the output
    is too large."""
    limit: tuple[Size, ...] = ()
    """The largest ``scale`` that rounding explains, on either side of 0."""
    sd: tuple[Size, ...] = ()
    """Standard deviation of ``scale`` over correct runs that round."""
    mean: tuple[float, ...] = ()
    """Mean of ``scale`` over correct runs that round."""
    noise: tuple[Size | None, ...] = ()
    """How noisy the output is, in units of the noisiest correct run that rounds; null if no correct
    run has noise."""
    vacuous: tuple[Count, ...] = ()
    """The entries in which the reference was zero, so that no error in scale could show."""
    silent: tuple[Count, ...] = ()
    """The entries in which rounding explains even an output of zero, or of twice the size."""
    shares: dict[str, tuple[Size | None, ...]] = field(default_factory=dict)
    """Each other statistic as a share of its limit, rounded up to three digits. A share over 1 is a
    disagreement, and so is null, which stands for any number over a limit of zero. A share is 0 if
    it was not measured. Outputs that are a single number have no shares."""
    unit: Size = 0.0
    """Unit roundoff of the output's dtype."""
    kernels: Count = 1
    """The number of kernels whose rounding is in the output: 2 if two kernels are compared."""
    faults: tuple[str, ...] = ()
    """What is wrong regardless of noise, in words."""
    pooled: PooledRecord | None = None
    """Null if no problem says anything about the scale."""
    planted: dict[str, Size] = field(default_factory=dict)
    """The share of the planted errors that were rejected, by kind."""
    blind: tuple[str, ...] = ()
    """Planted errors that were accepted although the limits say otherwise: a fault of lossgate."""

    @property
    def margins(self) -> dict[str, float]:
        """The largest share of its limit that each statistic reached. Over 1 is a disagreement."""
        scales = zip(self.scale, self.limit, strict=False)
        of_scale = max((_share(abs(scale), limit) for scale, limit in scales), default=0.0)
        return {"scale": of_scale, **{name: _largest(shares) for name, shares in self.shares.items()}}

    @property
    def disagrees(self) -> bool:
        """Whether its numbers or its faults say that it is wrong."""
        pooled_wrong = self.pooled is not None and not self.pooled.agrees
        return bool(self.faults) or pooled_wrong or not max(self.margins.values()) <= 1

    @property
    def must_be_compared(self) -> bool:
        """Whether AGREE requires that its scale was compared. Metrics may be zero everywhere."""
        return not self.metric or bool(self.silent)


def _share(value: float, limit: float) -> float:
    if limit:
        return value / limit
    return inf if value else 0.0


def _largest(shares: tuple[float | None, ...]) -> float:
    """Returns the largest share of a limit. None stands for a number over a limit of 0."""
    return inf if None in shares else max(cast("tuple[float, ...]", shares), default=0.0)
