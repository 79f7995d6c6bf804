# SPDX-License-Identifier: Apache-2.0
"""Collects the cases by which a disagreement is diagnosed, and runs as many as are needed."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from lossgate.base.errors import CandidateError
from lossgate.cases.case import Case
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.diagnosis.coarser_precision import Coarser, as_coarse_as_usual
from lossgate.diagnosis.observed import Observed
from lossgate.worlds.base import RankFailure

FIRST = 3
"""The number of failing problems on which every counterfactual is tried."""
FRESH = 6
"""The number of further failing problems that a cause must explain."""
_TRIED = 40
"""The largest number of problems that are run to find failing ones."""
_TRIED_IF_FEW_ARE_MISSING = 60
"""The same if at most ``FIRST`` failing problems are missing."""


@dataclass
class Inquiry:
    """The state of a diagnosis. Cases are run when they are needed."""

    cases: Iterator[Case]
    alike: Iterator[Case]
    """Cases like the failing problem, for a kernel that fails on few others."""
    seen: list[Observed] = field(default_factory=list)
    """The cases that have run."""
    known: list[Counterfactual] = field(default_factory=list)
    """All mistakes that are compared, the plainest first."""
    likely: list[Counterfactual] = field(default_factory=list)
    """The mistakes that explain the first failing problems."""

    @property
    def failing(self) -> list[Observed]:
        return [one for one in self.seen if one.wrong]

    def observe(self, failing: int) -> bool:
        """Runs cases until a number of them have failed. Returns whether so many have."""
        return self._found(failing, self.cases) or self._found(failing, self.alike)

    def _found(self, failing: int, cases: Iterator[Case]) -> bool:
        while (missing := failing - len(self.failing)) > 0:
            is_enough = len(self.seen) >= (_TRIED_IF_FEW_ARE_MISSING if missing <= FIRST else _TRIED)
            if is_enough and cases is self.cases:
                return False
            case = next(cases, None)
            if case is None:
                return False
            try:
                self.seen.append(Observed(case))
            except (RankFailure, CandidateError):
                continue  # this failure has its own message, and numbers to compare are missing
        return True

    @cached_property
    def as_if_coarser(self) -> tuple[Coarser, list[Observed]] | None:
        """The default rounding of torch as a change to the declared precision, and all problems
        judged with that change. None if it is declared already, or if too few problems fail.
        """
        first = self.failing[0].case
        change = as_coarse_as_usual(first.candidate, first.problem.dtype)
        if change is None or not self.observe(2 * (FIRST + FRESH)):
            return None
        candidate = change.of(first.candidate, first.problem.dtype)
        return change, [one.as_if_declared(candidate) for one in self.seen]
