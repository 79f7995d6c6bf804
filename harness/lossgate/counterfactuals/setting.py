# SPDX-License-Identifier: Apache-2.0
"""What a counterfactual knows of a problem on a layout."""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placed_problem import PlacedProblem
from lossgate.layout import Axis
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition, VocabShard
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.heads.base import Head
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec

Fields = Mapping[str, Any]
"""What a reference is given of a batch, by name."""


class Setting:
    """A problem on a layout, as the reference sees it: whole, without padding, in float64.

    Args:
        placed: the problem.
        returned: the outputs that the candidate returns.
    """

    def __init__(self, placed: PlacedProblem, returned: Collection[Output]) -> None:
        self.placed, self.returned = placed, frozenset(returned)

    @property
    def bound(self) -> BoundProblem:
        """The problem without its layout."""
        return self.placed.bound

    @property
    def spec(self) -> Spec:
        return self.bound.spec

    @cached_property
    def bound_spec(self) -> BoundSpec:
        """The spec with the problem's options."""
        return self.bound.bound_spec.returning(self.returned)

    @property
    def batch(self) -> GlobalBatch:
        """The whole batch."""
        return self.bound.batch

    @property
    def head(self) -> Head:
        return HEADS[self.bound.problem.head]

    @property
    def partition(self) -> Partition:
        """How the ranks split it."""
        return self.placed.partition

    @cached_property
    def fields(self) -> Fields:
        """What the reference is given."""
        return self.batch.known

    @property
    def temperature(self) -> float:
        return self.bound.bound_spec.temperature

    def size(self, axis: Axis) -> int:
        """The ranks on an axis."""
        return self.partition.layout.sizes[axis]

    @property
    def vocab_shards(self) -> list[VocabShard]:
        """The rows of each tp rank."""
        return self.partition.vocab_shards

    @cached_property
    def token_shards(self) -> list[Tensor]:
        """The tokens of each rank, dp rank after dp rank, and of these cp rank after cp rank."""
        return self.partition.real_token_shards

    @property
    def tokens(self) -> int:
        return len(self.fields["mask"])

    def mask_of(self, tokens: Tensor) -> Tensor:
        """Returns ``[tokens]`` bool, true at some tokens."""
        return torch.zeros(self.tokens, dtype=torch.bool).index_fill(0, tokens, True)

    def group_of(self, rank: int, axes: Collection[Axis]) -> list[int]:
        """Returns the ranks, numbered as ``token_shards``, that differ from one in other axes than
        these: those over which a rank adds up if it leaves these axes out.
        """
        cp = self.size("cp")
        at = {"dp": rank // cp, "cp": rank % cp}
        return [
            other
            for other in range(len(self.token_shards))
            if all({"dp": other // cp, "cp": other % cp}[axis] == at[axis] for axis in axes)
        ]

    def moved_on_each_rank(self, x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns a tensor of tokens of which each rank has moved its own part."""
        parts = [(tokens, move(x[tokens])) for tokens in self.token_shards if len(tokens)]
        if not parts:
            return x
        return torch.empty_like(x).index_copy(0, torch.cat([t for t, _ in parts]), torch.cat([y for _, y in parts]))
