# SPDX-License-Identifier: Apache-2.0
"""The split of packed sequences over the ranks of context parallelism, and its inverse.

It is the zigzag of Megatron-LM, NeMo-RL and AReaL: each padded sequence is cut into ``2 cp`` equal
pieces, and rank r holds the pieces r and ``2 cp - 1 - r``, so that causal attention costs every
rank the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def pieces_of(ranks: int) -> int:
    """Returns the number of equal pieces into which a sequence is cut."""
    return 2 * ranks if ranks > 1 else 1


def own_tokens(lengths: Tensor, ranks: int, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens of a rank, in the order in which the rank holds them.

    Args:
        lengths: ``[sequences]`` padded lengths, multiples of ``pieces_of(ranks)``.
        ranks: number of ranks.
        rank: the rank.
        tokens: number of tokens of a rank.

    Returns:
        Two tensors ``[tokens]``: the sequence of each token, and its position there.
    """
    own = lengths // ranks
    sequence, local = _end_to_end(own, tokens)
    if ranks == 1:
        return sequence, local
    pieces, piece = pieces_of(ranks), (own // 2)[sequence]
    second = local >= piece
    return sequence, torch.where(second, (pieces - 1 - rank) * piece + local - piece, rank * piece + local)


def all_tokens(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns the sequence of each token of the whole padded pack, and its position there.

    Args:
        starts: ``[sequences + 1]``, where sequences start in the padded pack.
        tokens: number of tokens of the padded pack.
    """
    return _end_to_end(starts.diff(), tokens)


def gathered(local: Tensor, index: Tensor, starts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers every rank's tokens, in the order of the whole padded pack.

    Args:
        local: ``[tokens, ...]``, the numbers of this rank's tokens.
        index: ``[tokens]``, the index of each of these tokens in the padded pack.
        starts: ``[sequences + 1]``, where sequences start in the padded pack.
        group: the ranks over which the pack is split.

    Returns:
        ``[ranks tokens, ...]``. The gradient of a rank's own tokens is that of the result,
        unchanged.

    Collectives:
        Forward: one all-gather of local. Backward: none.
    """
    return _Gather.apply(local, index, _order(starts, group.size(), len(index)), group)  # type: ignore[return-value]


def _end_to_end(lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(len(lengths), device=lengths.device)
    sequence = torch.repeat_interleave(numbers, lengths, output_size=tokens)
    return sequence, torch.arange(tokens, device=lengths.device) - (lengths.cumsum(0) - lengths)[sequence]


def _order(starts: Tensor, ranks: int, tokens: int) -> Tensor:
    """Returns where each token of the padded pack is in the concatenation of all ranks' tokens."""
    sequence, position = all_tokens(starts, ranks * tokens)
    piece = (starts.diff() // (2 * ranks))[sequence]
    number, within = position // piece, position % piece
    rank = torch.minimum(number, 2 * ranks - 1 - number)
    return rank * tokens + starts[sequence] // ranks + within + torch.where(number >= ranks, piece, 0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(index)
        parts = local.new_empty(group.size(), *local.shape)
        dist.all_gather(list(parts.unbind()), local.contiguous(), group=group)
        return parts.flatten(0, 1)[order]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return upstream[index], None, None, None
