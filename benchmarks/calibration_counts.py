# SPDX-License-Identifier: Apache-2.0
"""What ``calibration.py`` counts, as data that is written, read again and added up."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf, log10
from typing import Any

from lossgate.engine.case_result import CaseResult
from lossgate.judge.comparison import Comparison
from lossgate.judge.pooled_output import pool
from lossgate.judge.statistics import SCALE

_STEPS = 20
"""Minimum detectable effects are counted by the upper end of a step, so many to a power of ten."""


@dataclass
class RightCounts:
    """What came of a kernel that is right, or of the difference of two."""

    problems: int = 0
    comparisons: int = 0
    alarms: list[dict[str, Any]] = field(default_factory=list)
    """The problem and the findings of each disagreement."""
    margins: dict[str, float] = field(default_factory=dict)
    """The largest of each statistic of each output, as a share of its limit."""
    mdes: Counter[str] = field(default_factory=Counter)
    """How many comparisons state which minimum detectable effect."""
    pools: int = 0
    pool_alarms: int = 0
    pool_margin: float = 0.0
    """The largest pooled scale, as a share of its limit."""
    pool_noise_margin: float = 0.0
    """The largest pooled noise, as a share of its limit."""
    pool_mdes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "RightCounts":
        return cls(**{**data, "mdes": Counter(data["mdes"]), "pool_mdes": Counter(data["pool_mdes"])})

    def add(self, result: CaseResult) -> None:
        """Counts a problem."""
        self.problems += 1
        self.comparisons += len(result.comparisons)
        for comparison in result.comparisons:
            for name, share in comparison.shares.items():
                self._raise(f"{comparison.output}: {name}", share)
        self.mdes.update(_step(c.mde) for c in result.comparisons if c.tells_scale)
        if not result.agrees:
            self.alarms.append({"problem": result.problem.to_json(), "findings": list(result.findings)})

    def add_pool(self, comparisons: list[Comparison]) -> None:
        """Counts the comparisons of one output over all problems as a pool."""
        pooled = pool(comparisons[0].output, comparisons)
        if not pooled.problems:
            return
        self.pools += 1
        self.pool_alarms += not pooled.agrees
        self.pool_margin = max(self.pool_margin, abs(pooled.scale) / pooled.limit)
        if pooled.noise is not None:
            self.pool_noise_margin = max(self.pool_noise_margin, pooled.noise.noise / pooled.noise.limit)
        self.pool_mdes[_step(pooled.mde)] += 1

    def merge(self, other: "RightCounts") -> None:
        """Adds what another run counted."""
        for name in ("problems", "comparisons", "alarms", "mdes", "pools", "pool_alarms", "pool_mdes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.pool_margin = max(self.pool_margin, other.pool_margin)
        self.pool_noise_margin = max(self.pool_noise_margin, other.pool_noise_margin)
        for name, share in other.margins.items():
            self._raise(name, share)

    def _raise(self, name: str, share: float) -> None:
        self.margins[name] = max(self.margins.get(name, 0.0), share)

    @property
    def largest(self) -> tuple[str, float]:
        """The statistic that comes nearest to its limit, and its share."""
        return max(self.margins.items(), key=lambda item: item[1], default=("-", 0.0))


@dataclass
class WrongCounts:
    """What came of the kernels with one bug."""

    problems: int = 0
    caught: int = 0
    visible: int = 0
    visible_caught: int = 0

    def add(self, right: CaseResult, wrong: CaseResult) -> None:
        """Counts a problem, from the results of the right kernel and of the one with the bug.

        A bug is visible if it shifts the SCALE of an output by more than the minimum detectable
        effect that the judge states for the right kernel.
        """
        of_wrong = {comparison.output: comparison for comparison in wrong.comparisons}
        pairs = ((r, of_wrong[r.output]) for r in right.comparisons if r.output in of_wrong)
        visible = any(
            abs(w.values[SCALE] - r.values[SCALE]) > r.mde for r, w in pairs if r.values and w.values and not r.vacuous
        )
        self.problems += 1
        self.caught += not wrong.agrees
        self.visible += visible
        self.visible_caught += visible and not wrong.agrees

    def merge(self, other: "WrongCounts") -> None:
        for name in ("problems", "caught", "visible", "visible_caught"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def _step(mde: float) -> str:
    return f"{ceil(_STEPS * log10(mde)) / _STEPS:.2f}" if 0 < mde < inf else "inf"


def median_step(steps: Mapping[str, int]) -> float:
    """Returns the median of minimum detectable effects that were counted in steps."""
    return _at(sorted(steps.items(), key=lambda step: float(step[0])), sum(steps.values()) / 2)


def largest_step(steps: Iterable[str]) -> float:
    return max((10 ** float(step) for step in steps), default=inf)


def _at(steps: list[tuple[str, int]], rank: float) -> float:
    for step, count in steps:
        rank -= count
        if rank <= 0:
            return 10 ** float(step)
    return inf
