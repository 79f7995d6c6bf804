# SPDX-License-Identifier: Apache-2.0
"""Head "logprobs": the kernel starts from the log-probabilities of the labels."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lossgate.problems.partition import Dims
from lossgate.specs.heads.base import HeadContext, ValueHead


class LogprobsHead(ValueHead):
    """Log-probabilities lie between slightly below 0, a confident label, and about ``-logit_std``
    nats.
    """

    name = "logprobs"
    meaning = "from the labels' log-probabilities"
    leaves: ClassVar[Mapping[str, Dims]] = {"logprobs": ("token",)}

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        logprobs = -problem.logit_std * context.streams.uniform("logprobs", problem.tokens) - 2.0**-6
        return {"logprobs": logprobs}
