# SPDX-License-Identifier: Apache-2.0
"""The outcome for one output of one problem: its statistics, their limits, and faults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Literal, NamedTuple, get_args

from lossgate.judge.statistics import SCALE
from lossgate.specs.outputs import Output

Manner = Literal["raises", "not finite", "missing", "wrong"]
"""In which way a kernel fails: a call raises an error, an output is NaN or infinite, backward did
not reach an input, or anything else."""
MANNERS: tuple[Manner, ...] = get_args(Manner)
"""The manners in the order in which failures are told."""


class Entry(NamedTuple):
    """An entry of an output that is off."""

    place: str
    """Its place by dims, such as "token 3, vocab 0"; "" if the output is a single number."""
    got: float
    want: float

    @property
    def relative(self) -> float | None:
        """The difference relative to what was expected; None if that is 0."""
        return abs(self.got - self.want) / abs(self.want) if self.want else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One output of one problem, compared with the reference."""

    output: Output
    called: str = ""
    """How the kernel was called, in words; empty unless a property calls it in several ways."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The value of each statistic. SCALE has a sign."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """The limit of each statistic."""
    where: Mapping[str, str] = field(default_factory=dict)
    """The number of the worst entry or block, by statistic."""
    farthest: tuple[Entry, ...] = ()
    """The entry with the greatest absolute difference, then that with the greatest relative one if
    that is larger. Empty unless a statistic is over its limit, and for differences of kernels."""
    sd: float = 0.0
    """Standard deviation of SCALE over the ensemble."""
    mean: float = 0.0
    """Mean of SCALE over the ensemble: rounding makes the largest of many numbers larger."""
    noise: float | None = None
    """The noise of the result, in units of the noisiest run. None if no run has noise, or if right
    kernels may be noisier than every run."""
    unit: float = 0.0
    """Unit roundoff of the output's dtype."""
    kernels: int = 1
    """Number of kernels whose rounding is in the output: 2 for the difference of two kernels."""
    faults: tuple[str, ...] = ()
    """What is wrong whatever the noise, in words."""
    manner: Manner = "wrong"
    """In which way the output is wrong, if it is."""
    vacuous: bool = False
    """Whether the reference is zero, or so small next to its noise that no error in its scale could
    show."""
    rejected: Mapping[str, bool] = field(default_factory=dict)
    """For each planted error, whether the comparison rejected it."""
    blind: tuple[str, ...] = ()
    """The planted errors that the comparison accepted, although by its own limits it must reject
    them."""

    @property
    def shares(self) -> dict[str, float]:
        """Each statistic as a share of its limit; over 1 is a disagreement. NaN is over all."""
        return {name: _share(abs(value), self.limits[name]) for name, value in self.values.items()}

    @property
    def margin(self) -> float:
        """The largest share."""
        return max(self.shares.values(), default=0.0)

    @property
    def agrees(self) -> bool:
        return not self.faults and self.margin <= 1

    @property
    def tells_scale(self) -> bool:
        """Whether an error in the scale could show. None could if the reference is zero, or if
        rounding explains even a result of zero.
        """
        return bool(self.values) and not self.vacuous and not self.silent

    @property
    def silent(self) -> bool:
        """Whether rounding explains even a result of zero, and one of twice the reference."""
        return bool(self.values) and not self.vacuous and not self.limits[SCALE] < 1

    @property
    def mde(self) -> float:
        """The minimum detectable effect: the smallest e for which this result, scaled by 1 + e or
        1 - e, is surely rejected.
        """
        if self.vacuous or not self.values:
            return inf
        return self.limits[SCALE] + abs(self.values[SCALE])


def _share(value: float, limit: float) -> float:
    if isnan(value) or isnan(limit):
        return inf
    if limit:
        return value / limit
    return inf if value else 0.0
