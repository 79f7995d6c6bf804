# SPDX-License-Identifier: Apache-2.0
"""Lays out whole sequences, as a framework's loss function gets them: before the shift, and before
cp splits them.

They lie in rows or in one padded stream. An entry describes its own token. In a rank's shard, the
value of a prediction stands one entry earlier: at the token before the one that is predicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lossgate.problems.partition import Partition
from lossgate.problems.random_streams import RandomStreams

Tokens = Literal["shard", "rows", "packed"]
TOKENS: Mapping[Tokens, str] = MappingProxyType(
    {
        "shard": "this rank's tokens, shifted and split",
        "rows": "a row for each sequence of the dp rank, before shift and split",
        "packed": "the padded pack of the dp rank as one row, before shift and split",
    }
)
"""How a candidate is given the fields of tokens."""

_SPARE_COLUMNS = 3
"""Rows are up to two columns wider than the longest sequence."""


@dataclass(frozen=True)
class WholeSequences:
    """The places of a dp rank's tokens in rows, or in a stream of one row."""

    partition: Partition
    token: Tensor
    """``[rows, columns]``: the index of each entry's token in the padded pack of the batch; -1 at
    padding."""
    sequence: Tensor
    """``[rows, columns]``: the number of each entry's sequence, also at padding."""

    @classmethod
    def of(cls, partition: Partition, tokens: Tokens, rank: int) -> "WholeSequences":
        """Lays out the sequences of a dp rank.

        Args:
            partition: how the layout splits the batch.
            tokens: "rows" or "packed".
            rank: any rank of the dp rank.
        """
        own = partition.sequences(partition.layout.coordinate(rank)["dp"])
        starts, lengths = torch.tensor(partition.starts), torch.tensor(partition.lengths)
        if tokens == "packed":
            token = torch.arange(partition.starts[own.start], partition.starts[own.stop])[None]
            sequence = partition.sequence_of_token[token]
        else:
            spare = _spare(partition, "columns", _SPARE_COLUMNS, 1).item()
            column = torch.arange(max(partition.lengths) + spare)
            sequence = torch.arange(own.start, own.stop)[:, None].expand(-1, len(column))
            token = starts[sequence] + column
        end = starts[sequence] + lengths[sequence]
        return cls(partition, torch.where(token < end, token, -1), sequence)

    @cached_property
    def predicted_at(self) -> Tensor:
        """``[rows, columns]``: the index of the token before, from which each entry's token is
        predicted; -1 at the first token of a sequence and at padding.
        """
        first = torch.tensor(self.partition.starts)[self.sequence]
        return torch.where(self.token > first, self.token - 1, -1)

    def lay(self, field: Tensor, *, shifted: bool) -> Tensor:
        """Lays out a field of tokens.

        An entry without a value holds the value of some token, so that a kernel which uses it is
        seen. There is one exception: a bool for each token is false at padding.

        Args:
            field: ``[tokens, ...]`` of the padded pack.
            shifted: whether the field belongs to the prediction of the next token.

        Returns:
            ``[rows, columns, ...]``.
        """
        source = self.predicted_at if shifted else self.token
        some_token = _spare(self.partition, "entries", len(field), *source.shape)
        laid = field[torch.where(source < 0, some_token, source)]
        if laid.dtype is torch.bool and laid.dim() == 2:
            return laid & (self.token >= 0)
        return laid

    def lay_upstream(self, cotangent: Tensor) -> Tensor:
        """Lays out an upstream gradient ``[tokens]`` of predictions. Other entries are 0."""
        return torch.where(self.predicted_at < 0, 0.0, cotangent[self.predicted_at])

    def pack(self, laid: Tensor) -> Tensor:
        """Undoes ``lay`` with ``shifted=True``.

        Args:
            laid: ``[rows, columns]``.

        Returns:
            ``[tokens]`` of the padded pack of the whole batch; 0 at tokens that ``laid`` has no
            value for.
        """
        there = self.predicted_at >= 0
        packed = laid.new_zeros(self.partition.tokens)
        packed[self.predicted_at[there]] = laid[there]
        return packed


def _spare(partition: Partition, stream: str, below: int, *shape: int) -> Tensor:
    """Draws numbers that are the same on every rank."""
    return RandomStreams("whole sequences", *partition.lengths).integers(stream, below, *shape)
