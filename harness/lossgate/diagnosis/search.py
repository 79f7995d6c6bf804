# SPDX-License-Identifier: Apache-2.0
"""The cases that are run to find a cause, as many as are needed."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lossgate.base.errors import CandidateError
from lossgate.cases.case import Case
from lossgate.diagnosis.observed import Observed
from lossgate.worlds.base import RankFailure

FIRST = 3
"""Failing problems on which every counterfactual is tried."""
FRESH = 6
"""Fresh failing problems on which a name must hold."""
TRIED = 40
"""The most problems that are run for these."""
_TRIED_IF_FEW_ARE_MISSING = 60
"""The same, if at most ``FIRST`` failing ones are missing."""


@dataclass
class Search:
    """The cases that have run."""

    cases: Iterator[Case]
    seen: list[Observed] = field(default_factory=list)

    @property
    def failing(self) -> list[Observed]:
        return [one for one in self.seen if one.wrong]

    def observe(self, failing: int) -> bool:
        """Runs cases until so many have failed. Returns whether they have."""
        while (missing := failing - len(self.failing)) > 0:
            if len(self.seen) >= (_TRIED_IF_FEW_ARE_MISSING if missing <= FIRST else TRIED):
                return False
            case = next(self.cases, None)
            if case is None:
                return False
            try:
                self.seen.append(Observed(case))
            except (RankFailure, CandidateError):
                continue  # that is a failure of its own, which needs no other name
        return True
