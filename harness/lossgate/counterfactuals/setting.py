# SPDX-License-Identifier: Apache-2.0
"""What a counterfactual knows of a problem on a layout."""

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lossgate.base.layout import Axis
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import PlacedProblem
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition, VocabShard
from lossgate.problems.whole_sequences import Tokens, WholeSequences
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.heads.head import Head
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec

Fields = Mapping[str, Any]
"""What a reference is given of a batch, by name."""

T = TypeVar("T")


class Setting:
    """A problem on a layout, as the reference sees it: whole, in float64, and without padding
    unless it is asked for.

    Args:
        placed: the problem.
        returned: the outputs that the candidate returns.
        tokens: how the candidate is given what belongs to tokens.
        tiles: the sizes at which its loops turn, by dim, if it declares them.
        padding: whether the batch is seen with its padding, as the ranks hold it.
    """

    def __init__(
        self,
        placed: PlacedProblem,
        returned: Collection[Output],
        tokens: Tokens = "shard",
        tiles: Mapping[str, tuple[int, ...]] | None = None,
        *,
        padding: bool = False,
    ) -> None:
        self.padding, self.tiles = padding, tiles or {}
        self.placed, self.returned = placed, frozenset(returned)
        self.given_tokens: Tokens = tokens
        self._known: dict[str, Any] = {}

    def once(self, what: str, find: Callable[[], T]) -> T:
        """Returns what is found for many mistakes, and looked for once."""
        if what not in self._known:
            self._known[what] = find()
        return self._known[what]

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
        return self.placed.batch if self.padding else self.bound.batch

    @property
    def with_padding(self) -> "Setting":
        """The same with padding, which hangs on the layout."""
        return self.once(
            "with padding",
            lambda: Setting(self.placed, self.returned, self.given_tokens, self.tiles, padding=True),
        )

    @property
    def head(self) -> Head:
        return HEADS[self.bound.problem.head]

    @property
    def partition(self) -> Partition:
        """How the ranks split it."""
        return self.placed.partition

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each sequence, without padding."""
        return self.bound.problem.lengths

    @cached_property
    def fields(self) -> Fields:
        """What the reference is given."""
        known = self.batch.known
        return {**known, "cu_seqlens": known["cu_seqlens_padded"]} if self.padding else known

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

    @property
    def vocab_rows(self) -> list[slice]:
        """The rows of each tp rank that has some."""
        return [slice(shard.start, shard.end) for shard in self.vocab_shards if shard.end > shard.start]

    @property
    def coordinates(self) -> list[dict[Axis, int]]:
        """The place on dp and on cp of each rank, in the order of ``token_shards``."""
        cp = self.size("cp")
        return [{"dp": rank // cp, "cp": rank % cp} for rank in range(len(self.token_shards))]

    @property
    def token_shards(self) -> list[Tensor]:
        """The tokens of each rank, dp rank after dp rank, and of these cp rank after cp rank."""
        return self.once("token shards", self._token_shards)

    def _token_shards(self) -> list[Tensor]:
        return list(self.partition.token_shards.values()) if self.padding else self.partition.real_token_shards

    @property
    def place_on_rank(self) -> Tensor:
        """The place of each token among those of its rank, padding counted, ``[tokens]``."""
        return self.once("place on rank", self._place_on_rank)

    def _place_on_rank(self) -> Tensor:
        place = torch.empty(self.partition.tokens, dtype=torch.long)
        for held in self.partition.token_shards.values():
            place[held] = torch.arange(len(held))
        return place if self.padding else place[self.partition.real_tokens]

    @property
    def held_by_ranks(self) -> list[int]:
        """How many tokens each rank holds, padding counted, in the order of ``token_shards``."""
        return [len(held) for held in self.partition.token_shards.values()]

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
        at = self.coordinates
        return [other for other in range(len(at)) if all(at[other][axis] == at[rank][axis] for axis in axes)]

    def moved_on_each_rank(self, x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns a tensor of tokens of which each rank has moved its own part."""
        parts = [(tokens, move(x[tokens])) for tokens in self.token_shards if len(tokens)]
        if not parts:
            return x
        return torch.empty_like(x).index_copy(0, torch.cat([t for t, _ in parts]), torch.cat([y for _, y in parts]))

    def rolled_on_each_rank(self, x: Tensor, by: int) -> Tensor:
        """Returns a tensor of tokens of which each rank has rolled its own part."""
        return self.moved_on_each_rank(x, lambda own: own.roll(by, 0))

    def padded(self, name: str) -> Tensor:
        """Returns a field of tokens as the ranks hold it, with padding, ``[padded tokens]``."""
        return self.placed.batch.fields[name]

    def as_given(self, name: str) -> Tensor:
        """Returns a field of tokens as whole sequences hold it, ``[padded tokens]``: what belongs
        to the prediction of a token stands at that token.
        """
        field, partition = self.padded(name), self.partition
        laid = field.clone()
        for dp in range(partition.layout.dp):
            rank = dp * partition.layout.cp * partition.layout.tp
            whole = WholeSequences.of(partition, self.given_tokens, rank)
            values = whole.lay(field, shifted=name not in self.spec.unshifted)
            if self.given_tokens == "packed":
                own = partition.sequences(dp)
                laid[partition.starts[own.start] : partition.starts[own.stop]] = values[0]
            else:
                laid[whole.token[whole.token >= 0]] = values[whole.token >= 0]
        return laid

    def moved_with_padding(self, name: str, source: Tensor, *, given: bool = False) -> Tensor:
        """Returns a field of tokens, each from another place of the padded pack.

        Args:
            name: of the field.
            source: where each entry of the padded pack comes from, ``[padded tokens]``; -1 for an
                entry that becomes 0 or false.
            given: whether that is a place in whole sequences, as they are given.
        """
        own = given or (name in self.spec.unshifted and self.given_tokens != "shard")
        moved = (self.as_given(name) if own else self.padded(name))[source.clamp(min=0)]
        moved[source < 0] = 0
        return moved if self.padding else moved[self.partition.real_tokens]

    def source_on_each_rank(self, by: int) -> Tensor:
        """Returns where the entries of the padded pack come from if each rank rolls its own."""
        source = torch.arange(self.partition.tokens)
        for own in self.partition.token_shards.values():
            source[own] = own.roll(by)
        return source
