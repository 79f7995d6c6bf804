# SPDX-License-Identifier: Apache-2.0
"""The view of a problem on its layout that a counterfactual gets."""

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
"""Fields of a batch, as a reference gets them, by name."""

T = TypeVar("T")


class Setting:
    """A problem on a layout, as the reference sees it: whole and in float64.

    Args:
        placed: the problem.
        returned: the outputs that the candidate returns.
        tokens: how the candidate gets the fields of tokens.
        tiles: the sizes of the candidate's chunks and tiles, by dim, if it declares them.
        padding: whether the batch has its padding, as on the ranks.
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
        """Returns the result of ``find``. It is called only once for each name ``what``."""
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
        """The same problem with its padding."""
        return self.once("with padding", self._with_padding)

    def _with_padding(self) -> "Setting":
        return Setting(self.placed, self.returned, self.given_tokens, self.tiles, padding=True)

    @property
    def head(self) -> Head:
        return HEADS[self.bound.problem.head]

    @property
    def partition(self) -> Partition:
        """How the batch is split into the shards of ranks."""
        return self.placed.partition

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each sequence, without padding."""
        return self.bound.problem.lengths

    @cached_property
    def fields(self) -> Fields:
        """The fields of the batch. With padding, ``cu_seqlens`` counts it."""
        known = self.batch.known
        return {**known, "cu_seqlens": known["cu_seqlens_padded"]} if self.padding else known

    @property
    def temperature(self) -> float:
        return self.bound.bound_spec.temperature

    def size(self, axis: Axis) -> int:
        """Returns the number of ranks on an axis."""
        return self.partition.layout.sizes[axis]

    @property
    def vocab_shards(self) -> list[VocabShard]:
        """The rows of the vocabulary that each tp rank holds, with padding."""
        return self.partition.vocab_shards

    @property
    def vocab_rows(self) -> list[slice]:
        """The rows of each tp rank, without padding. Ranks without a row are left out."""
        return [slice(shard.start, shard.end) for shard in self.vocab_shards if shard.end > shard.start]

    @property
    def coordinates(self) -> list[dict[Axis, int]]:
        """The index of each rank on dp and on cp, in the order of ``token_shards``."""
        cp = self.size("cp")
        return [{"dp": rank // cp, "cp": rank % cp} for rank in range(len(self.token_shards))]

    @property
    def token_shards(self) -> list[Tensor]:
        """The tokens of each rank of dp and cp. Ranks of the same dp index follow one another."""
        return self.once("token shards", self._token_shards)

    def _token_shards(self) -> list[Tensor]:
        return list(self.partition.token_shards.values()) if self.padding else self.partition.real_token_shards

    @property
    def place_on_rank(self) -> Tensor:
        """The place of each token among the tokens of its rank, padding counted, ``[tokens]``."""
        return self.once("place on rank", self._place_on_rank)

    def _place_on_rank(self) -> Tensor:
        place = torch.empty(self.partition.tokens, dtype=torch.long)
        for held in self.partition.token_shards.values():
            place[held] = torch.arange(len(held))
        return place if self.padding else place[self.partition.real_tokens]

    @property
    def held_by_ranks(self) -> list[int]:
        """The number of tokens of each rank, padding counted, in the order of ``token_shards``."""
        return [len(held) for held in self.partition.token_shards.values()]

    @property
    def tokens(self) -> int:
        return len(self.fields["mask"])

    def mask_of(self, tokens: Tensor) -> Tensor:
        """Returns a mask ``[tokens]`` that is true at some tokens, given by their numbers."""
        return torch.zeros(self.tokens, dtype=torch.bool).index_fill(0, tokens, True)

    def group_of(self, rank: int, axes: Collection[Axis]) -> list[int]:
        """Returns the ranks whose index on each of ``axes`` is that of ``rank``.

        A kernel adds up over these ranks if it leaves out the axes. Ranks are numbered in the order
        of ``token_shards``.
        """
        at = self.coordinates
        return [other for other in range(len(at)) if all(at[other][axis] == at[rank][axis] for axis in axes)]

    def moved_on_each_rank(self, x: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns a tensor of tokens in which ``move`` has changed the part of each rank."""
        held = [tokens for tokens in self.token_shards if len(tokens)]
        if not held:
            return x
        moved = [move(x[tokens]) for tokens in held]
        return torch.empty_like(x).index_copy(0, torch.cat(held), torch.cat(moved))

    def rolled_on_each_rank(self, x: Tensor, by: int) -> Tensor:
        """Returns a tensor of tokens in which the part of each rank is rolled."""
        return self.moved_on_each_rank(x, lambda own: own.roll(by, 0))

    def padded(self, name: str) -> Tensor:
        """Returns a field of tokens with padding, as the ranks hold it, ``[padded tokens]``."""
        return self.placed.batch.fields[name]

    def as_given(self, name: str) -> Tensor:
        """Returns a field of tokens as it is in whole sequences, ``[padded tokens]``.

        The entry for the prediction of a token stands at that token, not at the one before it.
        """
        field, partition = self.padded(name), self.partition
        laid = field.clone()
        for dp in range(partition.layout.dp):
            first_rank = dp * partition.layout.cp * partition.layout.tp
            whole = WholeSequences.of(partition, self.given_tokens, first_rank)
            values = whole.lay(field, shifted=name not in self.spec.unshifted)
            if self.given_tokens == "packed":
                own = partition.sequences(dp)
                laid[partition.starts[own.start] : partition.starts[own.stop]] = values[0]
            else:
                is_token = whole.token >= 0
                laid[whole.token[is_token]] = values[is_token]
        return laid

    def moved_with_padding(self, name: str, source: Tensor, *, given: bool = False) -> Tensor:
        """Returns a field of tokens whose entries come from other places of the padded pack.

        Args:
            name: the name of the field.
            source: the place from which each entry of the padded pack comes, ``[padded tokens]``;
                -1 for an entry that becomes 0 or false.
            given: whether these are places in the field as it is given, ``as_given``.
        """
        from_given = given or (name in self.spec.unshifted and self.given_tokens != "shard")
        field = self.as_given(name) if from_given else self.padded(name)
        moved = field[source.clamp(min=0)]
        moved[source < 0] = 0
        return moved if self.padding else moved[self.partition.real_tokens]

    def source_on_each_rank(self, by: int) -> Tensor:
        """Returns the place from which each entry of the padded pack comes if each rank rolls its
        own entries.
        """
        source = torch.arange(self.partition.tokens)
        for own in self.partition.token_shards.values():
            source[own] = own.roll(by)
        return source
