# SPDX-License-Identifier: Apache-2.0
"""Splits a packed batch and a vocabulary over the ranks of a layout.

dp splits the sequences, in order. cp splits the tokens of each padded sequence in a zigzag: of ``2
cp`` equal pieces, rank ``r`` owns pieces ``r`` and ``2 cp - 1 - r``. So causal attention costs
every rank the same (Megatron-LM, NeMo-RL, AReaL). tp splits the rows of the vocabulary.

Every tensor names its dims. An axis splits the dims in ``SHARDED_DIMS``, and replicates a tensor
that has none of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from lossgate.base.errors import UsageError
from lossgate.base.layout import Axis, Layout

Dim = str
"""The name of a dim. Dims "token", "vocab" and "sequence" are split over ranks, others are not."""

Dims = tuple[Dim, ...]

SHARDED_DIMS: Mapping[Axis, tuple[Dim, ...]] = {"dp": ("token", "sequence"), "cp": ("token",), "tp": ("vocab",)}

VocabSplit = Literal["balanced", "even", "chunked", "padded"]
VOCAB_SPLITS: Mapping[VocabSplit, str] = {
    "balanced": "sizes differ by at most one row, no rank is empty (torch.tensor_split)",
    "even": "all sizes are equal: the vocabulary is a multiple of tp, as Megatron-LM pads it to be",
    "chunked": "ceil(V / tp) rows each, the last ranks shorter or empty (torch.chunk, DTensor's Shard)",
    "padded": "ceil(V / tp) rows each, the last ranks filled up with padding rows that are no part of the vocabulary",
}


@dataclass(frozen=True)
class VocabShard:
    """Rows ``start:end`` of the vocabulary, then ``padding`` rows that belong to nobody."""

    start: int
    end: int
    padding: int = 0

    @property
    def rows(self) -> int:
        return self.end - self.start + self.padding


def split_vocab(vocab: int, tp: int, how: VocabSplit) -> list[VocabShard]:
    """Returns the shard of each tp rank."""
    if how == "even" and vocab % tp:
        raise UsageError(
            f"a vocabulary of {vocab} does not split evenly over tp={tp} ranks; "
            "use another size, or another vocab_split"
        )
    if how in ("balanced", "even"):
        if vocab < tp:
            raise UsageError(
                f"layout larger than the problem: a vocabulary of {vocab} has too few rows for tp={tp} ranks; "
                f"use tp <= {vocab}"
            )
        rows, extra = divmod(vocab, tp)
        bounds = [0, *accumulate(rows + (rank < extra) for rank in range(tp))]
        return [VocabShard(start, end) for start, end in pairwise(bounds)]
    size = -(-vocab // tp)
    shards = [VocabShard(min(rank * size, vocab), min((rank + 1) * size, vocab)) for rank in range(tp)]
    if how == "padded":
        shards = [VocabShard(s.start, s.end, size - s.rows) for s in shards]
    return shards


@dataclass(frozen=True)
class Partition:
    """The split of sequences and of a vocabulary over a layout.

    Each sequence is padded to a multiple of ``pad_to_multiple`` tokens, times the ``2 cp`` pieces
    of the zigzag if cp splits it. A sequence without tokens stays empty. dp keeps ``group_size``
    neighbours on one rank, such as the two sequences of a preference pair.
    """

    layout: Layout
    lengths: tuple[int, ...]
    vocab: int
    vocab_split: VocabSplit = "balanced"
    pad_to_multiple: int = 1
    group_size: int = 1

    @cached_property
    def padded_lengths(self) -> tuple[int, ...]:
        unit = self.pad_to_multiple * (2 * self.layout.cp if self.layout.cp > 1 else 1)
        return tuple(-(-length // unit) * unit for length in self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The start of each sequence in the padded pack, and the end of the last one."""
        return (0, *accumulate(self.padded_lengths))

    @property
    def tokens(self) -> int:
        """Length of the padded pack."""
        return self.starts[-1]

    @cached_property
    def real_tokens(self) -> Tensor:
        """Positions in the padded pack of the real tokens, which are no padding, in order;
        ``[sum(lengths)]``.
        """
        positions: list[int] = []
        for start, length in zip(self.starts[:-1], self.lengths, strict=True):
            positions.extend(range(start, start + length))
        return torch.tensor(positions, dtype=torch.long)

    @cached_property
    def sequence_of_token(self) -> Tensor:
        """The number of the sequence of each token of the padded pack, ``[tokens]``."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.padded_lengths))

    @cached_property
    def vocab_shards(self) -> list[VocabShard]:
        return split_vocab(self.vocab, self.layout.tp, self.vocab_split)

    def sequences(self, dp_rank: int) -> range:
        """Returns the sequences of a dp rank. The first ranks get one group more if dp does not
        divide the number of groups.
        """
        count, extra = divmod(len(self.lengths) // self.group_size, self.layout.dp)
        start = dp_rank * count + min(dp_rank, extra)
        end = start + count + (dp_rank < extra)
        return range(start * self.group_size, end * self.group_size)

    @property
    def empty(self) -> tuple[str, ...]:
        """What is empty: "sequence" if one has no token, "rank" if a dp rank has none, and "shard"
        if a tp rank has no row of the vocabulary.
        """
        of_dp = (self.sequences(rank) for rank in range(self.layout.dp))
        found = {
            "sequence": 0 in self.lengths,
            "rank": not all(any(self.lengths[one] for one in sequences) for sequences in of_dp),
            "shard": not all(shard.rows for shard in self.vocab_shards),
        }
        return tuple(name for name, there in found.items() if there)

    @cached_property
    def token_shards(self) -> dict[tuple[int, int], Tensor]:
        """``(dp rank, cp rank) -> `` the rank's positions in the padded pack, in the order in which
        it holds them.
        """
        return {
            (dp, cp): torch.tensor(list(self._owned(dp, cp)), dtype=torch.long)
            for dp in range(self.layout.dp)
            for cp in range(self.layout.cp)
        }

    @cached_property
    def real_token_shards(self) -> list[Tensor]:
        """The real tokens of each rank, in the order of ``token_shards``. Tokens are numbered
        without padding.
        """
        return [held[held >= 0] for held in self._numbers()]

    def real_token_chunks(self, size: int | None) -> list[list[Tensor]]:
        """Returns the real tokens of each rank, cut into chunks.

        Args:
            size: the tokens of a chunk, padding included; None for a single chunk. Chunks without
                real tokens are left out.
        """
        found: list[list[Tensor]] = []
        for held in self._numbers():
            chunks = [held] if size is None else held.split(size)
            real = (chunk[chunk >= 0] for chunk in chunks)
            found.append([tokens for tokens in real if len(tokens)])
        return found

    def _numbers(self) -> list[Tensor]:
        """Returns, for each rank, the numbers of its tokens among the real ones; -1 for padding."""
        number = torch.full((self.tokens,), -1)
        number[self.real_tokens] = torch.arange(len(self.real_tokens))
        return [number[shard] for shard in self.token_shards.values()]

    def shards_without(self, dims: Dims) -> tuple[object, ...]:
        """Returns a key for how ranks split the dims that a tensor of ``dims`` does not have.

        If two partitions have the same key, their ranks compute the same parts of such a tensor,
        which are added up.
        """
        vocab = tuple((shard.start, shard.end) for shard in self.vocab_shards)
        tokens = self.layout.dp, self.layout.cp, self.padded_lengths
        return () if "vocab" in dims else vocab, () if "token" in dims else tokens

    def _owned(self, dp: int, cp: int) -> Sequence[int]:
        """Returns the positions in the padded pack that a rank holds, in its order."""
        owned: list[int] = []
        for sequence in self.sequences(dp):
            start, length = self.starts[sequence], self.padded_lengths[sequence]
            if self.layout.cp == 1:
                owned.extend(range(start, start + length))
                continue
            piece = length // (2 * self.layout.cp)
            for index in (cp, 2 * self.layout.cp - 1 - cp):
                owned.extend(range(start + index * piece, start + (index + 1) * piece))
        return owned

    def shard(self, tensor: Tensor, dims: Dims, rank: int, vocab_padding: Tensor | None = None) -> Tensor:
        """Returns the part of a full tensor that a rank holds, as a new tensor. ``vocab_padding``
        has the padding rows of a "padded" vocabulary, with the same dims.
        """
        at = self.layout.coordinate(rank)
        tokens = self.token_shards[at["dp"], at["cp"]]
        for axis, dim in enumerate(dims):
            if dim == "token":
                tensor = tensor.index_select(axis, tokens)
            elif dim == "sequence":
                own = self.sequences(at["dp"])
                tensor = tensor.narrow(axis, own.start, len(own))
            elif dim == "vocab":
                shard = self.vocab_shards[at["tp"]]
                tensor = tensor.narrow(axis, shard.start, shard.end - shard.start)
                if shard.padding:
                    if vocab_padding is None:
                        raise ValueError("a padded vocabulary needs vocab_padding for its padding rows")
                    padding = vocab_padding.narrow(axis, 0, shard.padding)
                    if "token" in dims:
                        padding = padding.index_select(dims.index("token"), tokens)
                    tensor = torch.cat([tensor, padding], axis)
        return tensor.clone(memory_format=torch.contiguous_format)

    def local_shape(self, dims: Dims, rank: int, hidden: int) -> tuple[int, ...]:
        """Returns the shape of a rank's part of a tensor. ``hidden`` is the width of the hidden
        states.
        """
        at = self.layout.coordinate(rank)
        sizes: dict[Dim, int] = {
            "token": len(self.token_shards[at["dp"], at["cp"]]),
            "vocab": self.vocab_shards[at["tp"]].rows,
            "hidden": hidden,
            "sequence": len(self.sequences(at["dp"])),
        }
        return tuple(sizes[dim] for dim in dims)
