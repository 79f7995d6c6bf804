# SPDX-License-Identifier: Apache-2.0
"""Head "values": the kernel starts from the value head's predictions."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from lossgate.problems.partition import Dims
from lossgate.specs.heads.base import HeadContext, ValueHead


class ValuesHead(ValueHead):
    """One value per token."""

    name = "values"
    meaning = "from the value head's predictions"
    leaves: ClassVar[Mapping[str, Dims]] = {"values": ("token",)}

    def draw(self, context: HeadContext) -> dict[str, Tensor]:
        problem = context.problem
        values = context.streams.normal("values", problem.tokens) * problem.logit_std
        return {"values": values}
