# SPDX-License-Identifier: Apache-2.0
"""What the strategies give to a user's property test of packing: true and padded lengths."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.problems.batch import offsets
from lossgate.problems.partition import Partition


@dataclass(frozen=True)
class DrawnPack:
    """Sequences as a context-parallel trainer packs them: each padded, then all end to end.

    With cp ranks, a sequence is padded to a multiple of ``2 cp`` tokens, and of ``pad_to_multiple``
    of these pieces. Rank r has pieces r and ``2 cp - 1 - r`` of each sequence.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence, without padding."""
    cp: int = 1
    pad_to_multiple: int = 1

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        return self._partition.padded_lengths

    @property
    def tokens(self) -> int:
        """Length of the padded pack."""
        return self._partition.tokens

    @property
    def cu_seqlens(self) -> Tensor:
        """``[sequences + 1]`` int32: where the sequences would start without padding."""
        return offsets(self.lengths)

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """``[sequences + 1]`` int32: where the sequences start in the padded pack."""
        return offsets(self.padded_lengths)

    @property
    def real(self) -> Tensor:
        """``[tokens]`` bool: the token is no padding."""
        return torch.zeros(self.tokens, dtype=torch.bool).index_fill(0, self._partition.real_tokens, True)

    def of_rank(self, cp_rank: int) -> Tensor:
        """Returns the positions in the padded pack that a cp rank holds, in its order, int64."""
        if cp_rank not in range(self.cp):
            raise UsageError(f"of_rank({cp_rank!r}): expected a cp rank below {self.cp}")
        return self._partition.token_shards[0, cp_rank]

    @cached_property
    def _partition(self) -> Partition:
        return Partition(Layout(cp=self.cp), self.lengths, vocab=1, pad_to_multiple=self.pad_to_multiple)
