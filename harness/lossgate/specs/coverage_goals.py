# SPDX-License-Identifier: Apache-2.0
"""Coverage goals: situations that problems must reach before a verdict counts.

Here are those that most losses share; ``sharding_goals`` has those of layouts.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.problems.batch import GlobalBatch


class AtLeast(Container[Any]):
    """All numbers from ``least`` on."""

    def __init__(self, least: float) -> None:
        self._least = least

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and value >= self._least


Reached = Callable[[Any, Any, Any], Any]
"""``(values, batch, options) -> `` a bool, or a tensor of bools of which one must be true."""


@dataclass(frozen=True, kw_only=True)
class CoverageGoal:
    """A situation that at least one problem must reach.

    Args:
        meaning: what it is, to be read after "no problem reached goal NAME:".
        unreachable_if: containers of values, by option or scenario. A candidate cannot reach the
            goal if one container has every value of the option that the candidate supports, or
            every choice of the scenario that it is given.
        heads: the heads at which it can be reached; empty for all.
        axes: it exists only on layouts that split one of these axes; empty for all layouts.
        least_ranks: it exists only on layouts with so many ranks on one of the axes.
        dtypes: the dtypes in which it can be reached; empty for all. Some situations near a kink
            can't be reached in bfloat16: tokens that rounding may move over the kink are masked.
        reached: ``(values, batch, options) -> `` a bool, or a tensor of bools of which one must be
            true. None if ``covered=`` of the spec finds it.
    """

    meaning: str
    unreachable_if: Mapping[str, Container[Any]] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    least_ranks: int = 2
    dtypes: tuple[str, ...] = ()
    reached: Reached | None = None


Covered = Callable[[GlobalBatch, Any], set[str]]
"""``(unsharded batch, options) -> `` the names of the goals that a problem reaches."""

WITH_LOGITS = ("hidden", "logits")
"""The heads with logits. Only there can a kernel look up labels."""

TOKEN_GOALS: Mapping[str, CoverageGoal] = {
    "trained token": CoverageGoal(meaning="a token whose label is trained"),
    "masked token": CoverageGoal(meaning="a token whose label is not trained"),
    "label on the first row": CoverageGoal(
        meaning="a trained label on the first row of the vocabulary", heads=WITH_LOGITS
    ),
    "label on the last row": CoverageGoal(
        meaning="a trained label on the last row of the vocabulary", heads=WITH_LOGITS
    ),
}

BIAS_GOALS: Mapping[str, CoverageGoal] = {
    "with a bias": CoverageGoal(
        meaning="trained tokens, and an lm-head with a bias", heads=("hidden",), unreachable_if={"bias": (False,)}
    ),
    "without a bias": CoverageGoal(
        meaning="trained tokens, and an lm-head without a bias", heads=("hidden",), unreachable_if={"bias": (True,)}
    ),
}


def covered_token_goals(batch: GlobalBatch, trained: Tensor) -> set[str]:
    """Returns the ``TOKEN_GOALS`` that a batch reaches.

    Args:
        batch: the whole batch.
        trained: ``[tokens]`` bool, the tokens that count.
    """
    labels = batch.fields["labels"][trained]
    reached = {
        "trained token": trained.any(),
        "masked token": not trained.all(),
        "label on the first row": (labels == 0).any(),
        "label on the last row": (labels == batch.partition.vocab - 1).any(),
    }
    return {name for name, there in reached.items() if there}
