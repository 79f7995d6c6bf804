# SPDX-License-Identifier: Apache-2.0
"""rho: importance weights that correct for the engine that sampled not being the one that trains.

    x_t = clamp(log p_old - log p_vllm, -10, 10),   rho_t = exp(x_t);   with rho_mask_sequence_level  rho_t = exp(mean of x over t's sequence)
    dropped_t = rho_t < mask_lower or rho_t > mask_upper
    with rho_mask_tv_divergence  dropped_t = (tv < mask_lower or tv > mask_upper) and sign(x_t) A_t > 0,
                                 tv = mean of |exp(x) - 1| over t's sequence
    w_t = 0 if dropped_t, else clamp(rho_t, clamp_lower, clamp_upper)

No gradient flows through any of it. Both engines ran the same policy, p_old is the trainer's and p_vllm the sampler's probability.

open-instruct ``compute_rho_correction``: truncated importance sampling (the clamp), IcePop (the mask), the sequence mask of
DeepSeek-V3.2, the mask of VACO. Two bugs of it are not followed. It averages over a packed row, all its documents together, where
it means a sequence; here each document is one. And it reads a NaN of vLLM as the log-probability 1, hence rho = exp(log p_old - 1);
here the token has no correction: x = 0, and it counts so in means over its sequence.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import sequence_mean

LOG_RHO_BOUND = 10.0  # in nats, open-instruct's


@dataclass(frozen=True, kw_only=True)
class RhoOptions:
    """The options of ``importance_weights``; names and defaults are open-instruct's. Bounds are inclusive, 0 disables one."""

    use_rho_correction: bool = True
    """Whether the policy loss is weighted at all; without, every weight is 1. Not for ``old_logprobs`` that are vLLM's own."""
    rho_clamp_lower_bound: float = 0.0
    """Smallest weight of a token that is kept; below 1."""
    rho_clamp_upper_bound: float = 2.0
    """Largest weight; above 1."""
    rho_mask_lower_bound: float = 0.0
    """Tokens with a smaller rho are dropped; below 1. With ``rho_mask_tv_divergence``, in the unit of that, and any number."""
    rho_mask_upper_bound: float = 0.0
    """Tokens with a larger rho are dropped; above 1. With ``rho_mask_tv_divergence``, in the unit of that, and any number, where
    open-instruct still wants more than 1."""
    rho_mask_sequence_level: bool = False
    """Every token has its sequence's rho, a geometric mean: for the mask and as its weight, though open-instruct documents the mask alone."""
    rho_mask_tv_divergence: bool = False
    """The mask bounds apply to the sequence's mean of |rho - 1|, of tokens' own rho, and drop only tokens whose update would increase it."""

    def __post_init__(self) -> None:
        below_1, above_1 = "0, or a number between 0 and 1", "0, or a finite number above 1"
        tv, any_bound = self.rho_mask_tv_divergence, "0, or a finite positive number"
        for name, low, high, expected in (
            ("rho_clamp_lower_bound", 0, 1, below_1),
            ("rho_clamp_upper_bound", 1, float("inf"), above_1),
            ("rho_mask_lower_bound", 0, float("inf") if tv else 1, any_bound if tv else below_1),
            ("rho_mask_upper_bound", 0 if tv else 1, float("inf"), any_bound if tv else above_1),
        ):
            value = getattr(self, name)
            if value != 0 and not low < value < high:
                raise ValueError(f"{name} is {value!r}; expected {expected}")
        if 0 < self.rho_mask_upper_bound <= self.rho_mask_lower_bound:
            raise ValueError(
                f"rho_mask_upper_bound is {self.rho_mask_upper_bound!r}; expected 0, or more than the lower, {self.rho_mask_lower_bound!r}"
            )


class Rho(NamedTuple):
    """What ``importance_weights`` finds of each token; weight 1 and nothing clamped or dropped without ``use_rho_correction``."""

    weight: Float[Tensor, " tokens"]
    """w, the factor of the policy loss."""
    rho: Float[Tensor, " tokens"]
    """exp(x), the token's own also with ``rho_mask_sequence_level``, neither clamped by options nor dropped."""
    clamped: Bool[Tensor, " tokens"]
    """Whether a clamp bound changed it, dropped or not."""
    dropped_low: Bool[Tensor, " tokens"]
    dropped_high: Bool[Tensor, " tokens"]


def importance_weights(
    *,
    old_logprobs: Float[Tensor, " tokens"],
    vllm_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    options: RhoOptions,
) -> Rho:
    """``rho`` of each token. Inputs at masked tokens must have been selected away; what is returned there means nothing."""
    old_logprobs = old_logprobs.detach()
    corrected = mask & ~vllm_logprobs.isnan()
    x = torch.where(corrected, torch.clamp(old_logprobs - vllm_logprobs, -LOG_RHO_BOUND, LOG_RHO_BOUND), 0.0)
    own = x.exp()
    nothing = torch.zeros_like(mask)
    if not options.use_rho_correction:
        return Rho(torch.ones_like(own), own, nothing, nothing, nothing)
    rho = sequence_mean(x, mask, sequence, sequences)[sequence].exp() if options.rho_mask_sequence_level else own

    judged, may_drop = rho, mask
    if options.rho_mask_tv_divergence:
        judged = sequence_mean((own - 1).abs(), mask, sequence, sequences)[sequence]
        may_drop = mask & (x.sign() * advantages > 0)
    dropped_low = may_drop & (judged < options.rho_mask_lower_bound) if options.rho_mask_lower_bound else nothing
    dropped_high = may_drop & (judged > options.rho_mask_upper_bound) if options.rho_mask_upper_bound else nothing

    clamped = torch.clamp(rho, options.rho_clamp_lower_bound, options.rho_clamp_upper_bound or float("inf"))
    return Rho(torch.where(dropped_low | dropped_high, 0.0, clamped), own, clamped != rho, dropped_low, dropped_high)
