# SPDX-License-Identifier: Apache-2.0
"""Heads without logits: the kernel starts from log-probabilities, values or rewards."""

from torch import Tensor

from lossgate.specs.heads.head import HeadContext, ValueHead
from lossgate.specs.record import Record, built_in_field


class Logprobs(Record):
    """The input that head "logprobs" adds to the batch."""

    logprobs: Tensor = built_in_field(
        "token", "log-probabilities of the labels; requires grad. Equal on all tp ranks", dtype="input"
    )


class LogprobsHead(ValueHead):
    """The kernel is given the labels' log-probabilities. Problems draw them from about
    ``-logit_std`` nats to slightly below 0, where a label is nearly certain.
    """

    name = "logprobs"
    meaning = "from the labels' log-probabilities"
    inputs = Logprobs

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        logprobs = -problem.logit_std * context.streams.uniform("logprobs", problem.tokens) - 2.0**-6
        return {"logprobs": logprobs}


class Values(Record):
    """The input that head "values" adds to the batch."""

    values: Tensor = built_in_field(
        "token", "the predictions of the value head; requires grad. Equal on all tp ranks", dtype="input"
    )


class ValuesHead(ValueHead):
    """The kernel is given one value per token."""

    name = "values"
    meaning = "from the value head's predictions"
    inputs = Values

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        values = context.streams.normal("values", problem.tokens) * problem.logit_std
        return {"values": values}


class Rewards(Record):
    """The input that head "rewards" adds to the batch."""

    rewards: Tensor = built_in_field(
        "sequence",
        "the predictions of the reward model, one for each of this dp rank's sequences; requires grad. "
        "Equal on all cp and tp ranks",
        dtype="input",
    )


class RewardsHead(ValueHead):
    """The kernel is given one score per sequence."""

    name = "rewards"
    meaning = "from the reward model's scores"
    inputs = Rewards

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        return {"rewards": context.streams.normal("rewards", len(problem.lengths)) * problem.logit_std}
