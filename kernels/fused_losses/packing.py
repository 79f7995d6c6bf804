# SPDX-License-Identifier: Apache-2.0
"""Packs of sequences that are split over the ranks of context parallelism.

Sequences lie end to end in a pack. The split is the zigzag of Megatron-LM, NeMo-RL and AReaL: each
padded sequence is cut into ``2 cp`` equal pieces, and rank r holds the pieces r and
``2 cp - 1 - r``, so that causal attention costs every rank the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.ranks import alone


@dataclass(frozen=True)
class Pack:
    """This rank's tokens of a pack, in the order in which the rank holds them.

    Make one with ``Pack.of``. Fields are ``[tokens]``, unless said otherwise. One call of a kernel
    and one call of a loss then serve all sequences of the pack: pass ``labels`` to
    ``linear_logprobs``, and ``sequence`` to ``clipped_pg_loss``, ``dpo_loss`` or ``grpo_loss``.
    """

    index: Tensor
    """Index of the token in the whole padded pack."""
    sequence: Tensor
    """Number of the token's sequence."""
    position: Tensor
    """Position of the token in its sequence."""
    real: Tensor
    """Bool: the token is not padding."""
    cu_seqlens: Tensor
    """``[sequences + 1]`` int64: where the sequences would start without padding."""
    cu_seqlens_padded: Tensor
    """``[sequences + 1]`` int64: where the sequences start in the padded pack."""
    cp: int
    """Number of ranks over which the pack is split."""

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None = None,
        *,
        cp_group: dist.ProcessGroup | None = None,
        tokens: int | None = None,
    ) -> "Pack":
        """Makes the pack of this rank from the lengths of the sequences.

        Sequences may be empty. Padding may have any length: that of the last sequence may fill the
        bin, and a tail that belongs to no sequence is one more sequence of true length 0. If only
        the padded lengths are known, pass them as the true ones. ``real`` is then true everywhere,
        and masks must exclude padding.

        The lengths are read on the host, which waits there for the device: they are checked, and
        decide how many tokens this rank has. Nothing else of a pack waits, so make it once.

        Args:
            cu_seqlens: ``[sequences + 1]`` integers, the true lengths added up from 0.
            cu_seqlens_padded: ``[sequences + 1]`` integers, the padded lengths added up from 0; the
                true ones by default. With a ``cp_group``, every padded length must be a multiple of
                twice its number of ranks.
            cp_group: the ranks over which the pack is split; None for no split.
            tokens: the expected number of this rank's tokens, to be checked; None for no check.

        Raises:
            ValueError: Lengths do not fit each other, the number of ranks, or ``tokens``.
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
                f"tokens {tokens}: cu_seqlens_padded ends at {int(padded[-1])}, "
                f"so each of {ranks} ranks has {count}; pass that number, or None"
            )
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=true.device), own, output_size=count)
        # Position among this rank's tokens of the sequence.
        local = torch.arange(count, device=true.device) - (own.cumsum(0) - own)[sequence]
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
        """Number of sequences, empty ones included."""
        return len(self.cu_seqlens) - 1

    def from_rows(self, rows: Tensor, *, shift: int, fill: float = 0) -> Tensor:
        """Lays rows out like this rank's tokens of the pack.

        The token at position t of sequence b gets ``rows[b, t + shift]``. It gets ``fill`` where
        that is padding, beyond the width (an inflated last sequence), or in a sequence that has no
        row (a tail). So nothing wraps around at the end of a sequence.

        Args:
            rows: ``[rows, width]``.
            shift: 1 if rows describe a token, while the pack needs the prediction of the next one:
                ids for ``labels``, token masks, and NeMo-RL's advantages and log-probabilities with
                a leading 0. 0 if rows are shifted already.
            fill: the value of tokens without an entry.

        Returns:
            ``[tokens]``, in the dtype of rows.

        Raises:
            ValueError: ``rows`` or ``shift`` does not fit.
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
        """Returns the id of the next token for each of this rank's tokens.

        Ids are shifted before the split, so the end of a rank's piece has the right label.

        Args:
            input_ids: ``[rows, width]``.
            fill: the label where there is no next token; ``linear_cross_entropy`` ignores -100.

        Returns:
            ``[tokens]``, in the dtype of ``input_ids``.
        """
        return self.from_rows(input_ids, shift=1, fill=fill)

    def split(self, whole: Tensor) -> Tensor:
        """Selects this rank's tokens of a whole pack.

        Args:
            whole: ``[padded_tokens, ...]``.

        Returns:
            ``[tokens, ...]``.

        Raises:
            ValueError: ``whole`` is not as long as the padded pack.
        """
        if len(whole) != self._padded_tokens:
            raise ValueError(f"whole {list(whole.shape)}: expected the {self._padded_tokens} tokens of the padded pack")
        return whole[self.index]

    def gather(self, local: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
        """Gathers numbers of single tokens, such as log-probabilities, on every rank.

        It is for a loss that every rank of the group computes in full: the gradient of a rank's own
        tokens is the gradient of the loss, unchanged. ``torch.distributed.nn`` makes it too large
        by a factor of cp.

        Args:
            local: ``[tokens]``, of this rank.
            cp_group: the group that ``Pack.of`` was given.

        Returns:
            ``[padded_tokens]``, the whole pack in order.

        Raises:
            ValueError: ``local`` or ``cp_group`` does not fit the pack.

        Collectives:
            Forward: one all-gather of ``[tokens]``. Backward: none.
        """
        if local.shape != self.index.shape:
            raise ValueError(
                f"local {list(local.shape)}: expected a number for each of {len(self.index)} tokens of this rank"
            )
        if (1 if cp_group is None else cp_group.size()) != self.cp:
            raise ValueError(
                f"cp_group of {1 if cp_group is None else cp_group.size()} ranks: this pack is split over {self.cp}; "
                "pass the cp_group that Pack.of was given"
            )
        if alone(cp_group):
            return local
        return _Gather.apply(local, self.index, self._order, cp_group)  # type: ignore[return-value]

    @property
    def _padded_tokens(self) -> int:
        """Length of the padded pack, known without reading ``cu_seqlens_padded`` on the host."""
        return len(self.index) * self.cp

    def _whole(self) -> tuple[Tensor, Tensor]:
        """Returns the sequence of each token of the padded pack, and its position there."""
        lengths = self.cu_seqlens_padded.diff()
        numbers = torch.arange(self.sequences, device=lengths.device)
        of = torch.repeat_interleave(numbers, lengths, output_size=self._padded_tokens)
        return of, torch.arange(self._padded_tokens, device=lengths.device) - self.cu_seqlens_padded[:-1][of]

    @property
    def _order(self) -> Tensor:
        """Index of each token of the padded pack in the concatenation of all ranks' tokens."""
        of, position = self._whole()
        piece = (self.cu_seqlens_padded.diff() // (2 * self.cp))[of]
        number = position // piece.clamp(min=1)
        rank = torch.minimum(number, 2 * self.cp - 1 - number)
        local = (
            self.cu_seqlens_padded[:-1][of] // self.cp
            + position % piece.clamp(min=1)
            + torch.where(number >= self.cp, piece, 0)
        )
        return rank * len(self.index) + local

    def to_rows(self, local: Tensor, width: int, cp_group: dist.ProcessGroup | None) -> Tensor:
        """Gathers numbers of single tokens as one row for each sequence, on every rank.

        Args:
            local: ``[tokens]``, of this rank.
            width: number of columns; positions beyond it are dropped.
            cp_group: the group that ``Pack.of`` was given.

        Returns:
            ``[sequences, width]``: position t of sequence b at ``[b, t]``, 0 at padding.

        Raises:
            ValueError: ``local`` or ``cp_group`` does not fit the pack.

        Collectives:
            Those of ``gather``.
        """
        whole = self.gather(torch.where(self.real, local, 0), cp_group)
        of, position = self._whole()
        # Positions beyond the width share a column that is cut off: to leave them out by a mask,
        # the host would have to count them.
        columns = position.clamp(max=width)
        return whole.new_zeros(self.sequences, width + 1).index_put((of, columns), whole)[:, :width].contiguous()


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
            f"cu_seqlens {list(true.shape)} and cu_seqlens_padded {list(padded.shape)}: "
            "expected [S + 1] for both, starting at 0"
        )
    if int(true[0]) or int(padded[0]) or bool((true.diff() < 0).any()):
        raise ValueError(
            f"cu_seqlens {true.tolist()}: expected 0, and then no number below the one before; "
            "cu_seqlens_padded starts at 0 too"
        )
    short = (padded.diff() < true.diff()).nonzero()
    if len(short):
        number = int(short[0])
        raise ValueError(
            f"cu_seqlens_padded: sequence {number} has {int(padded.diff()[number])} tokens with padding and "
            f"{int(true.diff()[number])} without; expected at least as many with padding"
        )
    uneven = (padded.diff() % pieces).nonzero()
    if len(uneven):
        number = int(uneven[0])
        raise ValueError(
            f"cu_seqlens_padded: sequence {number} has {int(padded.diff()[number])} tokens, "
            f"expected a multiple of {pieces}, twice the number of ranks of cp_group; pad it"
        )
