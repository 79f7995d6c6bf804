# SPDX-License-Identifier: Apache-2.0
"""Masked sums and means over a pack of sequences laid end to end.

``sequence[t]`` is the number of the sequence that token t belongs to. Masked values are selected away, never multiplied
by zero, so that NaN or inf there does no harm; do so before anything else is computed of them, since the gradient
of an unselected NaN is NaN.
"""

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor


def select(mask: Bool[Tensor, " n"], x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """``x`` where ``mask``, 0 elsewhere."""
    return torch.where(mask, x, 0.0)


def divide(total: Float[Tensor, "..."], count: Num[Tensor, "..."], epsilon: float = 0.0) -> Float[Tensor, "..."]:
    """``total / count``, 0 where nothing was counted; or ``total / (count + epsilon)`` where an original has one.

    epsilon: 1e-8 in NeMo-RL's ``masked_mean``, 1e-5 in AReaL's SFT loss.
    """
    count = count.to(total.dtype)  # an int64 plus epsilon would be a float32, in which 1e-8 vanishes
    return total / (count + epsilon if epsilon else torch.where(count == 0, 1, count))


def token_mean(
    x: Float[Tensor, " tokens"], mask: Bool[Tensor, " tokens"], count: Num[Tensor, ""], epsilon: float = 0.0
) -> Float[Tensor, ""]:
    """``sum_t m_t x_t / count``; count is the whole batch's, over every rank and microbatch, so that parts add up."""
    return divide(select(mask, x).sum(), count, epsilon)


def sequence_sum(
    x: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"], sequences: int
) -> Float[Tensor, " sequences"]:
    """The sum over each sequence's tokens; 0 for an empty one."""
    return torch.zeros(sequences, dtype=x.dtype).index_add(0, sequence, x)


def sequence_mean(
    x: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    epsilon: float = 0.0,
) -> Float[Tensor, " sequences"]:
    """The mean over each sequence's unmasked tokens; 0 for one without any."""
    total, count = (sequence_sum(values, sequence, sequences) for values in (select(mask, x), mask.to(x.dtype)))
    return divide(total, count, epsilon)


def smallest(x: Float[Tensor, " n"], mask: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """``min x`` where ``mask``, +inf without any; also of nothing at all."""
    infinity = torch.full((1,), torch.inf, dtype=x.dtype)
    return torch.cat((torch.where(mask, x, torch.inf), infinity)).amin()


def largest(x: Float[Tensor, " n"], mask: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """``max x`` where ``mask``, -inf without any."""
    return -smallest(-x, mask)
