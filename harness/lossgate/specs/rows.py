# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch: ``[B, S, ...]``, a row for each sequence, padded on the right, as most
frameworks have it; and back to the tokens of a rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.base.errors import UsageError


@dataclass(frozen=True)
class Rows:
    """Where the tokens of a rank's padded pack lie in rows.

    Gradients flow through both ways.
    """

    starts: Tensor
    """``[B]`` int64: where each sequence starts in the padded pack."""
    lengths: Tensor
    """``[B]`` int64: its tokens, without padding."""
    tokens: int
    """Length of the padded pack."""
    width: int
    """Columns of the rows, S."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, input_ids: Tensor) -> "Rows":
        """Returns rows as wide as the longest sequence, or as those that the batch has already."""
        starts, lengths = cu_seqlens_padded.long(), cu_seqlens.long().diff()
        given_rows = input_ids.dim() == 2 and len(input_ids) == len(lengths)
        width = input_ids.shape[1] if given_rows else max([1, *lengths.tolist()])
        return cls(starts[:-1], lengths, int(starts[-1]), width)

    def lay(self, tensor: Tensor, fill: float) -> Tensor:
        """Lays ``[T, ...]`` out as ``[B, S, ...]``.

        Raises:
            UsageError: if the tensor does not have the tokens of the padded pack.
        """
        if not tensor.dim() or len(tensor) != self.tokens:
            raise UsageError(
                f"to_rows(a tensor of shape {list(tensor.shape)}): expected [{self.tokens}, ...], the tokens of this "
                f"dp rank's padded pack; {_CP}"
            )
        in_rows, in_pack = self._places(tensor.device, self.width)
        rows = tensor.new_full((len(self.lengths) * self.width, *tensor.shape[1:]), fill)
        rows = rows.index_copy(0, in_rows, tensor.index_select(0, in_pack))
        return rows.unflatten(0, (len(self.lengths), self.width))

    def pack(self, rows: Tensor) -> Tensor:
        """Undoes ``lay``: returns ``[T, ...]``, 0 at padding.

        Raises:
            UsageError: if it is no rows, or they are too narrow.
        """
        sequences, needed = len(self.lengths), max([0, *self.lengths.tolist()]) - 1
        if rows.dim() < 2 or len(rows) != sequences or rows.shape[1] < needed:
            raise UsageError(
                f"from_rows(a tensor of shape {list(rows.shape)}): expected [{sequences}, S, ...], a row for each "
                f"sequence of this dp rank; S is at least {max(needed, 0)}, one less than the longest"
            )
        in_rows, in_pack = self._places(rows.device, rows.shape[1])
        pack = rows.new_zeros((self.tokens, *rows.shape[2:]))
        return pack.index_copy(0, in_pack, rows.flatten(0, 1).index_select(0, in_rows))

    def of_trained(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """Returns ``[B]``: the number that all trained tokens of a sequence have; 0 if none is.

        Args:
            tensor: ``[T]`` of shards; or whole sequences, ``[B, S]`` or ``[1, T]``, where the
                number of a prediction is at the token that is predicted: the first has none.
            mask: the tokens that are trained, laid out likewise.

        Raises:
            UsageError: if the trained tokens of a sequence have different numbers.
        """
        if tensor.shape != mask.shape:
            raise UsageError(
                f"per_sequence(a tensor of shape {list(tensor.shape)}): expected a number for each token, in the "
                f"shape of mask, {list(mask.shape)}"
            )
        numbers, trained = self._predicted(tensor), self._predicted(mask)
        first = trained.int().argmax(1, keepdim=True)
        found = torch.where(trained.any(1), numbers.gather(1, first).squeeze(1), 0)
        if bool((trained & (numbers != found[:, None])).any()):
            raise UsageError(
                f"per_sequence(a tensor of shape {list(tensor.shape)}): the trained tokens of a sequence have "
                "different numbers; of advantages, exclude that in supports: "
                "{'advantages_per': lossgate.Excluded('token', because='...')}"
            )
        return found

    def _predicted(self, tensor: Tensor) -> Tensor:
        """Returns rows of what belongs to predictions, ``[B, S]``; 0 where there is none."""
        if tensor.dim() == 1:
            return self.lay(tensor, 0)
        given_rows = tensor.shape == (len(self.lengths), self.width)
        rows = (tensor if given_rows else self.lay(tensor[0], 0)).roll(-1, 1)
        there = torch.arange(self.width, device=rows.device) < self.lengths.to(rows.device)[:, None] - 1
        return torch.where(there, rows, 0)

    def _places(self, device: torch.device, width: int) -> tuple[Tensor, Tensor]:
        """Returns the places of all real tokens in rows of some width laid end to end, and in the
        padded pack. Rows that are one token too narrow leave out the last one.
        """
        column = torch.arange(width, device=self.lengths.device)
        sequence, column = (column < self.lengths[:, None]).nonzero(as_tuple=True)
        return (sequence * width + column).to(device), (self.starts[sequence] + column).to(device)


_CP = "a rank of a layout with cp holds a part of each sequence, so leave cp out of axes, or gather them first"
