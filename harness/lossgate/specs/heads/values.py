# SPDX-License-Identifier: Apache-2.0
"""Head "values": the kernel starts from the value head's predictions."""

from torch import Tensor

from lossgate.specs.heads.base import HeadContext, ValueHead
from lossgate.specs.record import Record, built_in_field


class Values(Record):
    """What head "values" gives beside the batch."""

    values: Tensor = built_in_field(
        "token", "the predictions of the value head; requires grad. Equal on all tp ranks", dtype="input"
    )


class ValuesHead(ValueHead):
    """One value per token."""

    name = "values"
    meaning = "from the value head's predictions"
    inputs = Values

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        values = context.streams.normal("values", problem.tokens) * problem.logit_std
        return {"values": values}
