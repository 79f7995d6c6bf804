# SPDX-License-Identifier: Apache-2.0
"""Masked sums and means over a pack of sequences laid end to end.

``sequence[t]`` is the number of the sequence that token t belongs to. Masked values are selected
away, and not multiplied by zero, so that NaN or inf in them has no effect. Select before computing
anything else from them: the gradient of a NaN that is selected away only later is NaN.
"""

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor


def select(mask: Bool[Tensor, " n"], x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns ``x`` where ``mask`` is true, and 0 elsewhere; both have shape ``[n]``."""
    return torch.where(mask, x, 0.0)


def divide(total: Float[Tensor, "..."], count: Num[Tensor, "..."], epsilon: float = 0.0) -> Float[Tensor, "..."]:
    """Divides sums by counts.

    Args:
        total: The sums, of any shape.
        count: The counts, of the same shape or a scalar.
        epsilon: Added to the counts, for originals that do so: 1e-8 in NeMo-RL's ``masked_mean``,
            1e-5 in AReaL's SFT loss.

    Returns:
        ``total / (count + epsilon)``. With epsilon 0, a count of 0 divides by 1, so that a sum over
        nothing stays 0.
    """
    count = count.to(total.dtype)  # an int64 plus epsilon would be a float32, in which 1e-8 vanishes
    return total / (count + epsilon if epsilon else torch.where(count == 0, 1, count))


def token_mean(
    x: Float[Tensor, " tokens"], mask: Bool[Tensor, " tokens"], count: Num[Tensor, ""], epsilon: float = 0.0
) -> Float[Tensor, ""]:
    """Computes ``sum_t m_t x_t / count``.

    Args:
        x: ``[tokens]``.
        mask: m ``[tokens]``.
        count: The count of the whole batch, over every rank and microbatch, so that parts add up.
        epsilon: Added to the count; see ``divide``.

    Returns:
        A scalar; 0 if nothing was counted.
    """
    return divide(select(mask, x).sum(), count, epsilon)


def sequence_sum(
    x: Float[Tensor, " tokens"], sequence: Int[Tensor, " tokens"], sequences: int
) -> Float[Tensor, " sequences"]:
    """Sums ``x`` over the tokens of each sequence; an empty sequence gets 0.

    Args:
        x: ``[tokens]``, already 0 at tokens that must not count.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sequences: The number of sequences.

    Returns:
        ``[sequences]``.
    """
    return torch.zeros(sequences, dtype=x.dtype).index_add(0, sequence, x)


def sequence_mean(
    x: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    epsilon: float = 0.0,
) -> Float[Tensor, " sequences"]:
    """Averages ``x`` over the tokens of each sequence where ``mask`` is true.

    Args:
        x: ``[tokens]``.
        mask: ``[tokens]``.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sequences: The number of sequences.
        epsilon: Added to the count of each sequence; see ``divide``.

    Returns:
        ``[sequences]``; 0 for a sequence whose tokens are all masked.
    """
    total, count = (sequence_sum(values, sequence, sequences) for values in (select(mask, x), mask.to(x.dtype)))
    return divide(total, count, epsilon)


def smallest(x: Float[Tensor, " n"], mask: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """Returns ``min x`` where ``mask`` is true; +inf if it is true nowhere, or if n is 0."""
    infinity = torch.full((1,), torch.inf, dtype=x.dtype)
    return torch.cat((torch.where(mask, x, torch.inf), infinity)).amin()


def largest(x: Float[Tensor, " n"], mask: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """Returns ``max x`` where ``mask`` is true; -inf if it is true nowhere, or if n is 0."""
    return -smallest(-x, mask)
