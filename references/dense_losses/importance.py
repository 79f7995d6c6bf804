# SPDX-License-Identifier: Apache-2.0
"""Weights that correct for tokens having been sampled by another policy than the one trained, as NeMo-RL has them.

With x_t = log p_prev(t) - log p_gen(t), of the policy before the update and of the one that generated:

    of a token:     w_t = exp(x_t)          of a sequence (GSPO):  w_i = exp(sum_t x_t)
    tis:            clamp(w, min, ratio)    min is 0 unless given
    icepop:         w if min <= w <= ratio, else 0
    seq-mask-tis:   w_t if min <= exp(mean_t x_t) <= ratio, else 0 for the whole sequence; w_t itself is not bounded

A weight that is not finite is 0. Weights are constants: no gradient flows through them.
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
    """Bounds of importance weights: which ``type``, and the bounds ``minimum`` and ``maximum``."""

    type: TruncationType
    minimum: float
    maximum: float

    def inside(self, w: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        return (w >= self.minimum) & (w <= self.maximum)


def exp_or_zero(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """``exp(x)``, and 0 with zero gradient where that is not finite (NeMo-RL's ``nan_to_num`` has the gradient 0 * inf = NaN there)."""
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
    """The weights, and which lie out of bounds.

    Weights are of sequences if ``of_sequences``, else of tokens. So is what lies out of bounds, except for seq-mask-tis, where it is of sequences.
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
