# SPDX-License-Identifier: Apache-2.0
"""A scalar that a candidate may return beside the loss."""

from dataclasses import dataclass
from typing import Literal

Reduction = Literal["sum", "min", "max"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A scalar that a candidate may return.

    Args:
        meaning: what it is, for people.
        reduction: how the parts of ranks that share a batch make the whole: "sum", "min" or "max".
            A mean is a sum that is already divided by a count of the whole batch.
    """

    meaning: str
    reduction: Reduction = "sum"
