# SPDX-License-Identifier: Apache-2.0
"""Packs of sequences that are split over the ranks of context parallelism.

Sequences lie end to end in a pack. ``zigzag.py`` says how it is split.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses import zigzag
from fused_losses.arguments import check_integer, mark_as_split
from fused_losses.packed_lengths import PackedLengths
from fused_losses.ranks import alone
from fused_losses.token_layouts import TokenLayout, check_layout

_SHIFTS = "or 1 for entries that belong to the next token, or more for tokens further ahead"


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
    """Number of the token's sequence.

    Losses that are given this tensor refuse another number of cp ranks than that of the pack.
    """
    position: Tensor
    """Position of the token in its sequence."""
    real: Tensor
    """Bool: the token is neither padding nor of a tail."""
    lengths: Tensor
    """``[sequences]`` int64: number of real tokens of each sequence, 0 in a tail."""
    cu_seqlens: Tensor
    """``[sequences + 1]`` int64: where the sequences would start without padding, as given."""
    cu_seqlens_padded: Tensor
    """``[sequences + 1]`` int64: where the sequences start in the padded pack."""
    cp: int
    """Number of ranks over which the pack is split."""
    host: PackedLengths
    """Lengths of the sequences on the host, for checks that do not wait for the device."""

    @classmethod
    def of(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None = None,
        *,
        cp_group: dist.ProcessGroup | None = None,
        tokens: int | None = None,
        tail: int = 0,
        row_width: int | None = None,
    ) -> "Pack":
        """Makes the pack of this rank from the lengths of the sequences.

        Sequences may be empty, and padding may have any length: the padding of the last sequence
        may fill the bin. Each sequence has a row, with an entry for each of its tokens, unless you
        declare otherwise:

        - with ``tail``, the last sequences have no row. AReaL ends a pack with a dummy sequence.
        - with ``row_width``, lengths may be larger than rows are wide. NeMo-RL passes padded
          lengths as the true lengths, and the last sequence fills the bin.

        Tokens that a declaration leaves out count as padding: ``real`` is false there. If lengths
        contain other padding, masks must exclude it.

        The lengths are read on the host, which waits for the device to check them and to learn how
        many tokens this rank has. Nothing else of a pack waits, so make it once.

        Args:
            cu_seqlens: ``[sequences + 1]`` integers, the true lengths added up from 0.
            cu_seqlens_padded: ``[sequences + 1]`` integers, the padded lengths added up from 0; by
                default the true lengths. With a ``cp_group``, every padded length must be a
                multiple of twice its number of ranks.
            cp_group: the ranks over which the pack is split; None for no split.
            tokens: the expected number of this rank's tokens, to be checked; None for no check.
            tail: number of sequences at the end of the pack that have no row.
            row_width: number of columns of all rows, if sequences may be longer; else None.

        Raises:
            ValueError: Lengths do not fit each other, or the number of ranks, ``tokens`` or
                ``tail`` does not fit them.
        """
        ranks, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
        host = PackedLengths.of(cu_seqlens, cu_seqlens_padded, tail, row_width)
        host.check_split(ranks, zigzag.pieces_of(ranks), tokens)
        true = cu_seqlens.to(torch.long)
        padded = true if cu_seqlens_padded is None else cu_seqlens_padded.to(torch.long)
        sequence, position = zigzag.own_tokens(padded.diff(), ranks, rank, host.padded_tokens // ranks)
        lengths = host.in_rows(true)
        return cls(
            index=padded[sequence] + position,
            sequence=sequence,
            position=position,
            real=position < lengths[sequence],
            lengths=lengths,
            cu_seqlens=true,
            cu_seqlens_padded=padded,
            cp=ranks,
            host=host,
        )

    def __post_init__(self) -> None:
        mark_as_split(self.sequence, self.cp)

    @property
    def sequences(self) -> int:
        """Number of sequences, empty ones and a tail included."""
        return len(self.cu_seqlens) - 1

    @property
    def rows(self) -> int:
        """Number of sequences that have a row: all but a declared tail."""
        return self.host.rows

    @property
    def longest(self) -> int:
        """Largest number of real tokens of a sequence, so the number of columns that rows need."""
        return self.host.longest

    @property
    def padded_tokens(self) -> int:
        """Number of tokens of the whole padded pack."""
        return self.host.padded_tokens

    def from_rows(self, rows: Tensor, *, shift: int, fill: float = 0) -> Tensor:
        """Selects the entries of this rank's tokens from rows, or from the packed tokens of all
        sequences.

        The token at position t of sequence b gets the entry of position ``t + shift`` of sequence
        b: ``rows[b, t + shift]``. If that is padding or belongs to a tail, the token gets ``fill``.
        So nothing crosses the end of a sequence.

        Args:
            rows: rows ``[B, width, ...]``, one for each sequence outside of a tail. Or the packed
                tokens, ``[T, ...]`` or ``[1, T, ...]``, with sequences end to end: T is the length
                of the whole pack, with padding or without.
            shift: 1 if rows describe a token, while the pack needs the prediction of the next one:
                ids for ``labels``, token masks, and NeMo-RL's advantages and log-probabilities with
                a leading 0. 0 if rows are shifted already, or if each token keeps its own entry, as
                with hidden states. 1 + k for ids and masks of multi-token prediction at depth k.
                Rows of ``width - 1`` predictions need a last column, from
                ``torch.nn.functional.pad``.
            fill: the value of tokens without an entry.

        Returns:
            ``[tokens, ...]``, in the dtype of rows.

        Raises:
            ValueError: ``rows`` do not match the sequences, or ``shift`` is no integer from 0.
        """
        check_integer("shift", shift, least=0, otherwise=_SHIFTS)
        column = self.position + shift
        here = column < self.lengths[self.sequence]
        packed = self._packed(rows)
        if packed is None:
            self.host.check_rows(rows, shift)
            values, at = rows, (self.sequence, column)
        else:
            values, starts = packed
            at = (starts[self.sequence] + column,)
        if not values.numel():
            return values.new_full((len(column), *values.shape[len(at) :]), fill)
        found = values[tuple(torch.where(here, i, 0) for i in at)]
        return found.masked_fill(~here.view(-1, *[1] * (found.dim() - 1)), fill)

    def labels(self, input_ids: Tensor, fill: int = -100, *, shift: int = 1) -> Tensor:
        """Returns the id of the next token for each of this rank's tokens.

        Ids are shifted before the split, so the end of a rank's piece has the right label.

        Args:
            input_ids: ``[B, width]``, ``[T]`` or ``[1, T]`` integers, as ``from_rows`` takes them.
            fill: the label where there is no next token; ``linear_cross_entropy`` ignores -100.
            shift: how far ahead the label is: 1 for the next token, 1 + k for multi-token
                prediction at depth k.

        Returns:
            ``[tokens]``, in the dtype of ``input_ids``.

        Raises:
            ValueError: ``input_ids`` do not match the sequences, or cannot hold ids.
        """
        if input_ids.dtype not in (torch.int16, torch.int32, torch.int64):
            raise ValueError(f"input_ids of {input_ids.dtype}: expected ids in int64, int32 or int16; call .long()")
        check_integer("shift", shift, least=1, otherwise="tokens ahead; 1 for the next token")
        labels = self.from_rows(input_ids, shift=shift, fill=fill)
        if labels.dim() != 1:
            raise ValueError(
                f"input_ids {list(input_ids.shape)}: expected one id for each token, as [B, width], [T] or [1, T]"
            )
        return labels

    def split(self, whole: Tensor, *, layout: TokenLayout = "bsh") -> Tensor:
        """Selects this rank's tokens of a whole padded pack.

        Args:
            whole: ``[padded_tokens, ...]`` or ``[1, padded_tokens, ...]``.
            layout: "sbh" for Megatron's ``[padded_tokens, 1, ...]``.

        Returns:
            ``[tokens, ...]``.

        Raises:
            ValueError: ``whole`` is not as long as the padded pack, or ``layout`` does not fit.
        """
        check_layout(layout)
        if layout == "sbh":
            if whole.dim() < 2 or whole.shape[1] != 1:
                raise ValueError(f"whole {list(whole.shape)}: layout 'sbh' expects [{self.padded_tokens}, 1, ...]")
            whole = whole[:, 0]
        else:
            whole = _without_batch(whole, self.padded_tokens)
        if not whole.dim() or len(whole) != self.padded_tokens:
            raise ValueError(
                f"whole {list(whole.shape)}: expected the {self.padded_tokens} tokens of the padded pack; "
                "from_rows takes rows, and tokens without padding"
            )
        return whole[self.index]

    def gather(self, local: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
        """Gathers numbers of single tokens, such as log-probabilities, on every rank.

        Use it for a loss that every rank of the group computes in full: the gradient of a rank's
        own tokens is the gradient of the loss, unchanged. ``torch.distributed.nn`` makes this
        gradient too large by a factor of cp.

        Args:
            local: ``[tokens, ...]`` or ``[1, tokens, ...]``, the numbers of this rank.
            cp_group: the group that ``Pack.of`` was given.

        Returns:
            ``[padded_tokens, ...]``, the whole pack in order.

        Raises:
            ValueError: ``local`` or ``cp_group`` does not fit the pack.

        Collectives:
            Forward: one all-gather of ``local``. Backward: none.
        """
        tokens = _without_batch(local, len(self.index))
        if not tokens.dim() or len(tokens) != len(self.index):
            raise ValueError(
                f"local {list(local.shape)}: expected a number for each of {len(self.index)} tokens of this rank"
            )
        if (1 if cp_group is None else cp_group.size()) != self.cp:
            raise ValueError(
                f"cp_group of {1 if cp_group is None else cp_group.size()} ranks: this pack is split over {self.cp}; "
                "pass the cp_group that Pack.of was given"
            )
        if cp_group is None or alone(cp_group):
            return tokens
        return zigzag.gathered(tokens, self.index, self.cu_seqlens_padded, cp_group)

    def to_rows(self, local: Tensor, width: int, cp_group: dist.ProcessGroup | None, *, shift: int = 0) -> Tensor:
        """Gathers numbers of single tokens as one row for each sequence, on every rank.

        It undoes ``from_rows`` of the same shift.

        Args:
            local: ``[tokens, ...]`` or ``[1, tokens, ...]``, the numbers of this rank.
            width: number of columns; at least ``longest``.
            cp_group: the group that ``Pack.of`` was given.
            shift: 1 if the number of a token is about the next token and belongs in the next
                token's column, as in NeMo-RL's ``prev_logprobs``; the first column is then 0. 0 if
                it stays in the token's own column. As many columns as ``shift`` says are 0.

        Returns:
            ``[rows, width, ...]``, with the number of position t of sequence b at
            ``[b, t + shift]``, and 0 at padding. A declared tail has no row.

        Raises:
            ValueError: An argument does not fit the pack.

        Collectives:
            Those of ``gather``.
        """
        check_integer("shift", shift, least=0, otherwise=_SHIFTS)
        if width < self.longest:
            raise ValueError(
                f"width {width}: the longest sequence has {self.longest} tokens; expected at least as many columns. "
                "If there is only padding beyond a width, pass that width to Pack.of as row_width"
            )
        whole = self.gather(local, cp_group)
        sequence, position = zigzag.all_tokens(self.cu_seqlens_padded, self.padded_tokens)
        column = position + shift
        # Tokens without an entry share one place at the end, which is cut off. To leave them out by
        # a mask, the host would have to wait for the device to count them.
        at = torch.where(column < self.lengths[sequence], sequence * width + column, self.rows * width)
        flat = whole.new_zeros(self.rows * width + 1, *whole.shape[1:]).index_put_((at,), whole)
        return flat[:-1].view(self.rows, width, *whole.shape[1:])

    def _packed(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns packed tokens as ``[T, ...]``, and where their sequences start; None for rows.

        The row of an only sequence can be read as rows or as packed tokens, with the same meaning.
        """
        starts = {self.host.true_tokens: self.cu_seqlens, self.padded_tokens: self.cu_seqlens_padded}
        if rows.dim() > 1 and rows.shape[0] == 1 and rows.shape[1] in starts:
            return rows[0], starts[rows.shape[1]]
        if rows.dim() == 1 or (rows.dim() > 1 and rows.shape[0] != self.rows):
            return (rows, starts[len(rows)]) if len(rows) in starts else None
        return None


def _without_batch(x: Tensor, tokens: int) -> Tensor:
    """Returns ``[1, tokens, ...]`` as ``[tokens, ...]``; other shapes as they are."""
    return x[0] if x.dim() > 1 and x.shape[0] == 1 and x.shape[1] == tokens else x
