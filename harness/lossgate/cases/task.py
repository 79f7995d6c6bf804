# SPDX-License-Identifier: Apache-2.0
"""What every rank is asked to do: run a candidate, forward and backward, on its shard.

It does so on the device of its rank. Problems are made, and results returned, on the CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lossgate.cases.rank_call import How, RankCall, plainly
from lossgate.declaration.candidate import Candidate
from lossgate.problems.batch import GlobalBatch
from lossgate.worlds.base import RankContext


@dataclass(frozen=True)
class RankTask:
    """A task for the ranks of a world.

    It is data: the candidate pickles as its source. The batch goes along, so that every rank has
    the same bits, whatever its machine.
    """

    candidate: Candidate
    options: Mapping[str, Any]
    """Those that are not at their default."""
    batch: GlobalBatch
    how: How[Any] = plainly
    """How the kernel is called."""

    def __call__(self, context: RankContext) -> Any:
        """Runs the candidate on this rank, and returns what ``how`` does.

        Raises:
            CandidateError: if it breaks its declared interface, or calls lossgate wrongly itself.
        """
        options = self.candidate.spec.bind(self.options).options
        return self.how(RankCall(self.candidate, options, self.batch, context))
