# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's importance weights, for tokens that were sampled from another policy than the trained
one.

With x_t = log p_prev(t) - log p_gen(t), where p_prev is the policy before the update and p_gen the
one that generated:

    of a token:     w_t = exp(x_t)
    of a sequence:  w_i = exp(sum_t x_t)                              GSPO
    tis:            clamp(w, min, ratio)                              min is 0 unless given
    icepop:         w if min <= w <= ratio, else 0
    seq-mask-tis:   w_t if min <= exp(mean_t x_t) <= ratio, else 0    for the whole sequence

seq-mask-tis does not bound w_t itself. A weight that is not finite is 0. Weights are constants: no
gradient flows through them.

Source: NeMo-RL ``ClippedPGLossFn``.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import select, sequence_mean, sequence_sum

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """How importance weights are bounded: the ``type``, and the inclusive bounds."""

    type: TruncationType
    minimum: float
    maximum: float

    def inside(self, w: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        return (w >= self.minimum) & (w <= self.maximum)


def exp_or_zero(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Computes ``exp(x)``, or 0 with zero gradient where that is not finite.

    NeMo-RL calls ``nan_to_num``, whose gradient there is 0 * inf = NaN.
    """
    return torch.where(x.exp().isfinite(), x, -torch.inf).exp()


def importance_weights(
    x: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    *,
    of_sequences: bool = False,
    truncation: Truncation | None = None,
    epsilon: float = 0.0,
) -> tuple[Float[Tensor, " units"], Bool[Tensor, " outside"]]:
    """Computes the importance weights, and which of them lie out of bounds.

    Args:
        x: ``[tokens]``, log p_prev - log p_gen in nats.
        mask: ``[tokens]``, true at tokens that count.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sequences: The number of sequences.
        of_sequences: Whether each sequence has one weight (GSPO), instead of each token.
        truncation: The bounds; None for weights without bounds.
        epsilon: Added to the count of each sequence in the mean of seq-mask-tis.

    Returns:
        The weights, ``[sequences]`` if ``of_sequences``, else ``[tokens]``; and whether each is out
        of bounds, in the same shape. For seq-mask-tis that is ``[sequences]``.
    """
    x = select(mask, x).detach()
    w = exp_or_zero(sequence_sum(x, sequence, sequences) if of_sequences else x)
    if truncation is None:
        return w, torch.zeros_like(w, dtype=torch.bool)
    if truncation.type == "seq-mask-tis":
        inside = truncation.inside(sequence_mean(x, mask, sequence, sequences, epsilon).exp())
        return select(inside[sequence], w), ~inside
    inside = truncation.inside(w)
    return w.clamp(truncation.minimum, truncation.maximum) if truncation.type == "tis" else select(inside, w), ~inside
