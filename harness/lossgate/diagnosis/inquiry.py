# SPDX-License-Identifier: Apache-2.0
"""What is found out of a disagreement: the cases that are run, as many as are needed."""

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
"""Failing problems on which every counterfactual is tried."""
FRESH = 6
"""Fresh failing problems on which a name must hold."""
_TRIED = 40
"""The most problems that are run for these."""
_TRIED_IF_FEW_ARE_MISSING = 60
"""The same, if at most ``FIRST`` failing ones are missing."""


@dataclass
class Inquiry:
    """What is known of a disagreement. Cases are run as they are needed."""

    cases: Iterator[Case]
    seen: list[Observed] = field(default_factory=list)
    known: list[Counterfactual] = field(default_factory=list)
    """All mistakes that are compared, the plainest first."""
    likely: list[Counterfactual] = field(default_factory=list)
    """Those that explain the first failing problems."""

    @property
    def failing(self) -> list[Observed]:
        return [one for one in self.seen if one.wrong]

    def observe(self, failing: int) -> bool:
        """Runs cases until so many have failed. Returns whether they have."""
        while (missing := failing - len(self.failing)) > 0:
            if len(self.seen) >= (_TRIED_IF_FEW_ARE_MISSING if missing <= FIRST else _TRIED):
                return False
            case = next(self.cases, None)
            if case is None:
                return False
            try:
                self.seen.append(Observed(case))
            except (RankFailure, CandidateError):
                continue  # that is a failure of its own, which needs no other name
        return True

    @cached_property
    def as_if_coarser(self) -> tuple[Coarser, list[Observed]] | None:
        """What torch rounds and the candidate does not declare, and all problems judged as if it
        did; None if there is no such thing, or too few problems fail.
        """
        first = self.failing[0].case
        change = as_coarse_as_usual(first.candidate, first.problem.dtype)
        if change is None or not self.observe(2 * (FIRST + FRESH)):
            return None
        candidate = change.of(first.candidate, first.problem.dtype)
        return change, [one.as_if_declared(candidate) for one in self.seen]
