# SPDX-License-Identifier: Apache-2.0
"""Head "logprobs": the kernel starts from the log-probabilities of the labels."""

from torch import Tensor

from lossgate.specs.heads.base import HeadContext, ValueHead
from lossgate.specs.record import Record, built_in_field


class Logprobs(Record):
    """What head "logprobs" gives beside the batch."""

    logprobs: Tensor = built_in_field(
        "token", "log-probabilities of the labels; requires grad. Equal on all tp ranks", dtype="input"
    )


class LogprobsHead(ValueHead):
    """Log-probabilities lie between slightly below 0, a confident label, and about ``-logit_std``
    nats.
    """

    name = "logprobs"
    meaning = "from the labels' log-probabilities"
    inputs = Logprobs

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        logprobs = -problem.logit_std * context.streams.uniform("logprobs", problem.tokens) - 2.0**-6
        return {"logprobs": logprobs}
