# SPDX-License-Identifier: Apache-2.0
"""Head "rewards": the kernel starts from the reward model's scores."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lossgate.problems.partition import Dims
from lossgate.specs.heads.base import HeadContext, ValueHead


class RewardsHead(ValueHead):
    """One score per sequence."""

    name = "rewards"
    meaning = "from the reward model's scores"
    leaves: ClassVar[Mapping[str, Dims]] = {"rewards": ("sequence",)}

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        return {"rewards": context.streams.normal("rewards", len(problem.lengths)) * problem.logit_std}
