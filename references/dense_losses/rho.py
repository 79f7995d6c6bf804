# SPDX-License-Identifier: Apache-2.0
"""rho: importance weights that correct for sampling with another engine than the one that trains.

Both engines ran the same policy: p_old is the probability by the trainer, p_vllm by the sampler.

    x_t       = clamp(log p_old - log p_vllm, -10, 10)
    rho_t     = exp(x_t)
                exp(mean of x over t's sequence)             with rho_mask_sequence_level
    dropped_t = rho_t < lower or rho_t > upper               rho_mask_{lower,upper}_bound
                (tv < lower or tv > upper) and sign(x_t) A_t > 0,
                tv = mean of |exp(x) - 1| over t's sequence  with rho_mask_tv_divergence
    w_t       = 0 if dropped_t, else clamp(rho_t)            rho_clamp_{lower,upper}_bound

A is the advantage. No gradient flows through any of it.

Source: open-instruct ``compute_rho_correction``. The clamp is truncated importance sampling, the
mask is that of IcePop, the sequence-level mask is that of DeepSeek-V3.2, and the mask by tv is that
of VACO. open-instruct has two bugs that we do not follow:

- It averages over all documents of a packed row, where it means one sequence. Here each document is
  a sequence.
- It reads a NaN of vLLM as the log-probability 1, hence rho = exp(log p_old - 1). Here such a token
  has no correction: x = 0, and it counts as such in means over its sequence.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import sequence_mean

LOG_RHO_BOUND = 10.0  # nats; the value of open-instruct


class Rho(NamedTuple):
    """The result of ``importance_weights`` for each token.

    Without ``use_rho_correction`` every weight is 1, and nothing is clamped or dropped.
    """

    weight: Float[Tensor, " tokens"]
    """w ``[tokens]``, the factor of the policy loss."""
    rho: Float[Tensor, " tokens"]
    """exp(x) ``[tokens]`` of the token itself, also with ``rho_mask_sequence_level``. The clamp and
    the mask do not change it."""
    clamped: Bool[Tensor, " tokens"]
    """``[tokens]``: whether a clamp bound changed the rho of the token, dropped or not."""
    dropped_low: Bool[Tensor, " tokens"]
    """``[tokens]``: whether the lower mask bound dropped the token."""
    dropped_high: Bool[Tensor, " tokens"]
    """``[tokens]``: whether the upper mask bound dropped the token."""


def importance_weights(
    *,
    old_logprobs: Float[Tensor, " tokens"],
    vllm_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    options: Any,
) -> Rho:
    """Computes the importance weight of each token.

    Args:
        old_logprobs: log p_old ``[tokens]``, in nats, by the trainer.
        vllm_logprobs: log p_vllm ``[tokens]``, in nats, by the sampler. NaN means no correction,
            and so does -inf for both policies.
        advantages: A ``[tokens]``.
        mask: ``[tokens]``, true at trained tokens. Inputs at other tokens must be finite: the
            caller has selected them away.
        sequence: ``[tokens]``, the number of the sequence (document) of each token. Means over a
            sequence need all of its tokens.
        sequences: The number of sequences.
        options: The options of ``lossgate.options.GrpoOptions``, as attributes.

    Returns:
        The weights, and which tokens were clamped or dropped. Values at masked tokens have no
        meaning.
    """
    old_logprobs = old_logprobs.detach()
    unknown = vllm_logprobs.isnan() | (vllm_logprobs.isneginf() & old_logprobs.isneginf())
    corrected = mask & ~unknown
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
