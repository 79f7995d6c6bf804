# SPDX-License-Identifier: Apache-2.0
"""Packs of sequences, laid end to end and split over the ranks of context parallelism: where each token is.

The split is the zigzag of Megatron-LM, NeMo-RL and AReaL: of ``2 cp`` equal pieces of each padded sequence, rank r holds
pieces r and ``2 cp - 1 - r``, so that causal attention costs every rank the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.ranks import alone


@dataclass(frozen=True)
class Pack:
    """This rank's tokens of a pack, ``[T]`` each, in the order in which it holds them. Make one with ``Pack.of``.

    With it, one call of a kernel and one of a loss serve all sequences of the pack, whatever their number: give ``labels`` to
    ``linear_logprobs``, and ``sequence`` to ``clipped_pg_loss``, ``dpo_loss`` or ``grpo_loss``.
    """

    index: Tensor
    """Of each token in the whole padded pack."""
    sequence: Tensor
    """The number of its sequence."""
    position: Tensor
    """In its sequence."""
    real: Tensor
    """Bool: it is no padding."""
    cu_seqlens: Tensor
    """``[S + 1]`` int64: where the sequences would start without padding."""
    cu_seqlens_padded: Tensor
    """``[S + 1]`` int64: where they start in the padded pack."""
    cp: int
    """Ranks that the pack is split over."""

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None = None,
        *,
        cp_group: dist.ProcessGroup | None = None,
        tokens: int | None = None,
    ) -> "Pack":
        """cu_seqlens: ``[S + 1]`` integers from 0, the true lengths added up. cu_seqlens_padded: the padded ones, by default the true.

        Sequences may be empty, and their padding of any length: the last one's may fill the bin; a tail that belongs to no sequence
        is one more, of true length 0. Where padded lengths are all that is known they may be given for the true ones:
        then ``real`` is true everywhere, and it is for masks to tell padding. tokens: of this rank, to be checked.

        Raises ``ValueError`` where these do not fit: with a cp_group every padded length must be a multiple of ``2 cp``.
        """
        ranks, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
        true = cu_seqlens.to(torch.long)
        padded = true if cu_seqlens_padded is None else cu_seqlens_padded.to(torch.long)
        pieces = 2 * ranks if ranks > 1 else 1
        _check(true, padded, pieces)
        lengths = padded.diff()
        own = lengths // ranks
        count = int(own.sum())
        if tokens is not None and tokens != count:
            raise ValueError(
                f"tokens {tokens}: cu_seqlens_padded ends at {int(padded[-1])}, which is {count} for each of {ranks} ranks"
            )
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=true.device), own, output_size=count)
        local = (
            torch.arange(count, device=true.device) - (own.cumsum(0) - own)[sequence]
        )  # within what this rank holds of the sequence
        piece = (lengths // pieces)[sequence]
        if ranks > 1:
            second = local >= piece
            position = torch.where(second, (pieces - 1 - rank) * piece + local - piece, rank * piece + local)
        else:
            position = local
        return cls(
            index=padded[sequence] + position,
            sequence=sequence,
            position=position,
            real=position < true.diff()[sequence],
            cu_seqlens=true,
            cu_seqlens_padded=padded,
            cp=ranks,
        )

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def from_rows(self, rows: Tensor, *, shift: int, fill: float = 0) -> Tensor:
        """``[B, width] -> [T]``: at position t of sequence b what ``rows[b, t + shift]`` has, ``fill`` where that is padding.

        shift: 1 where rows tell of a token and the pack of the next one's prediction: ids for ``labels``, token masks, advantages and
        log-probabilities with a leading 0 (NeMo-RL); 0 where rows are shifted already. Sequences without a row, as a tail is, and positions
        beyond the width, as those of an inflated last sequence, get ``fill``. So nothing wraps around at the end of a sequence.
        """
        if rows.dim() != 2 or shift not in (0, 1):
            raise ValueError(f"rows {list(rows.shape)}, shift {shift}: expected [B, width], and 0 or 1")
        column = self.position + shift
        here = (
            (column < self.cu_seqlens.diff()[self.sequence])
            & (column < rows.shape[1])
            & (self.sequence < rows.shape[0])
        )
        if not rows.numel():
            return rows.new_full(self.index.shape, fill)
        values = rows[torch.where(here, self.sequence, 0), torch.where(here, column, 0)]
        return torch.where(here, values, torch.as_tensor(fill, dtype=rows.dtype, device=rows.device))

    def labels(self, input_ids: Tensor, fill: int = -100) -> Tensor:
        """``[B, width] -> [T]``: the next token's id, shifted before the split, ``fill`` (that which is ignored) where there is none."""
        return self.from_rows(input_ids, shift=1, fill=fill)

    def split(self, whole: Tensor) -> Tensor:
        """``[padded pack, ...] -> [T, ...]``: this rank's tokens of a whole pack."""
        if len(whole) != int(self.cu_seqlens_padded[-1]):
            raise ValueError(
                f"whole {list(whole.shape)}: expected the {int(self.cu_seqlens_padded[-1])} tokens of the padded pack"
            )
        return whole[self.index]

    def gather(self, local: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
        """``[T] -> [padded pack]`` on every rank: one all-gather of T numbers, and none in backward.

        Of log-probabilities and other numbers of single tokens, never of logits. For a loss that every rank of the group computes whole: the
        gradient of a rank's own tokens is that of the loss as it is. (``torch.distributed.nn`` makes it too large by cp.)
        """
        if local.shape != self.index.shape:
            raise ValueError(f"local {list(local.shape)}: expected a number for each of {len(self.index)} tokens")
        if (1 if cp_group is None else cp_group.size()) != self.cp:
            raise ValueError(
                f"cp_group of {1 if cp_group is None else cp_group.size()} ranks: this pack is split over {self.cp}"
            )
        if alone(cp_group):
            return local
        return _Gather.apply(local, self.index, self._order, cp_group)  # type: ignore[return-value]

    @property
    def _order(self) -> Tensor:
        """Of each token of the padded pack in what the ranks hold, one rank after the other."""
        lengths = self.cu_seqlens_padded.diff()
        of = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        position = torch.arange(len(of), device=lengths.device) - self.cu_seqlens_padded[:-1][of]
        piece = (lengths // (2 * self.cp))[of]
        number = position // piece.clamp(min=1)
        rank = torch.minimum(number, 2 * self.cp - 1 - number)
        local = (
            self.cu_seqlens_padded[:-1][of] // self.cp
            + position % piece.clamp(min=1)
            + torch.where(number >= self.cp, piece, 0)
        )
        return rank * len(self.index) + local

    def to_rows(self, local: Tensor, width: int, cp_group: dist.ProcessGroup | None) -> Tensor:
        """``[T] -> [S, width]`` on every rank: position t of sequence b in ``[b, t]``, 0 at padding. See ``gather``."""
        lengths = self.cu_seqlens_padded.diff()
        whole = self.gather(torch.where(self.real, local, 0), cp_group)
        of = torch.repeat_interleave(torch.arange(self.sequences, device=lengths.device), lengths)
        position = torch.arange(len(of), device=lengths.device) - self.cu_seqlens_padded[:-1][of]
        inside = position < width
        return whole.new_zeros(self.sequences, width).index_put((of[inside], position[inside]), whole[inside])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts)[order]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return upstream[index], None, None, None


def _check(true: Tensor, padded: Tensor, pieces: int) -> None:
    if true.dim() != 1 or not len(true) or padded.shape != true.shape:
        raise ValueError(
            f"cu_seqlens {list(true.shape)} and cu_seqlens_padded {list(padded.shape)}: expected [S + 1] both, from 0"
        )
    if int(true[0]) or int(padded[0]) or bool((true.diff() < 0).any()):
        raise ValueError(f"cu_seqlens {true.tolist()}: expected 0, and then no number below the one before")
    short = (padded.diff() < true.diff()).nonzero()
    if len(short):
        number = int(short[0])
        raise ValueError(
            f"cu_seqlens_padded: sequence {number} has {int(padded.diff()[number])} tokens with padding and {int(true.diff()[number])} without"
        )
    uneven = (padded.diff() % pieces).nonzero()
    if len(uneven):
        number = int(uneven[0])
        raise ValueError(
            f"cu_seqlens_padded: sequence {number} has {int(padded.diff()[number])} tokens, expected a multiple of {pieces}, twice the ranks "
            "of cp_group; pad it"
        )
