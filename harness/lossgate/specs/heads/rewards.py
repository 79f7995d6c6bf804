# SPDX-License-Identifier: Apache-2.0
"""Head "rewards": the kernel starts from the reward model's scores."""

from torch import Tensor

from lossgate.specs.heads.base import HeadContext, ValueHead
from lossgate.specs.record import Record, built_in_field


class Rewards(Record):
    """What head "rewards" gives beside the batch."""

    rewards: Tensor = built_in_field(
        "sequence",
        "the predictions of the reward model, one for each of this dp rank's sequences; requires grad. "
        "Equal on all cp and tp ranks",
        dtype="input",
    )


class RewardsHead(ValueHead):
    """One score per sequence."""

    name = "rewards"
    meaning = "from the reward model's scores"
    inputs = Rewards

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        return {"rewards": context.streams.normal("rewards", len(problem.lengths)) * problem.logit_std}
