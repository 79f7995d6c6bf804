# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimisation (GRPO) as in open-instruct, with DAPO's and CISPO's losses.

With r = p / p_old, A the advantage, w the weight of ``importance_weights`` (rho.py) and
d = clamp(log p - log p_ref, -40, 40):

    DAPO:   policy = max(-A r, -A clamp(r, 1 - clip_lower, 1 + clip_higher))
    CISPO:  policy = -A min(sg(r), 1 + clip_higher) log p         sg stops the gradient
    kl:     0: d     1: d^2 / 2     2: expm1(-d) + d     3: r d
    L = loss_scale * sum_t m_t (w policy + beta kl) / D

m is the mask of trained tokens. D is their number in the whole batch, or a constant. CISPO clips
from above alone; NeMo-RL's CISPO clips from below too. Where d is clamped it has no gradient, but
estimator 3 still has the gradient of its r. The temperature divides the logits, before this stage.

Where top-k or top-p filtering leaves a label out, p or p_old is 0 (its logarithm -inf). Such a
token has no policy loss, and r is 0 there. The KL estimates have p without the filter.

Sources: open-instruct ``compute_grpo_loss``; GRPO (Shao et al. 2024, arXiv 2402.03300), DAPO
(arXiv 2503.14476), CISPO (MiniMax-M1, arXiv 2506.13585). We do not follow the bugs of
open-instruct's tiled version of this loss. It divides by at least 1, even where D is a smaller
constant, and it multiplies masked values by zero, so that infinities there spoil the batch; here
they are selected away. Earlier tiled versions reported no clipping by CISPO, and ignored rho and
the choice of estimator. rho.py lists more.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import divide, largest, select, smallest, token_mean
from dense_losses.rho import Rho, importance_weights

KL_BOUND = 40.0  # nats; the value of open-instruct


def grpo(
    *,
    logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"] | None,
    reference_logprobs: Float[Tensor, " tokens"],
    vllm_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    valid_tokens: Int[Tensor, ""],
    options: Any,
    unfiltered_logprobs: Float[Tensor, " tokens"] | None = None,
    with_metrics: bool = True,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Computes open-instruct's GRPO loss and its metrics.

    Args:
        logprobs: log p ``[tokens]``, in nats. The loss is differentiable in it.
        old_logprobs: log p_old ``[tokens]``, in nats. None means on-policy: ``logprobs`` without
            their gradient, so that the ratio is 1 but its gradient is not 0.
        reference_logprobs: log p_ref ``[tokens]``, in nats.
        vllm_logprobs: ``[tokens]``, in nats. NaN at a trained token means no correction, rho = 1.
            Without ``use_rho_correction`` they affect metrics alone.
        advantages: A ``[tokens]``.
        mask: m ``[tokens]``, true at trained tokens.
        sequence: ``[tokens]``, the number of the sequence of each token. A sequence is one document
            (open-instruct averages over all documents of a packed row), and it must be whole for
            the means of ``rho_mask_sequence_level`` and ``rho_mask_tv_divergence``.
        sequences: The number of sequences.
        valid_tokens: The number of trained tokens over every rank and microbatch. It divides the
            metrics, whatever D is.
        options: The options of ``lossgate.options.GrpoOptions``, as attributes.
        unfiltered_logprobs: log p ``[tokens]`` without top-k and top-p filtering, in nats, for the
            KL estimates; None for ``logprobs``. The loss is differentiable in it.
        with_metrics: Whether to compute the metrics, too. If not, the dictionary is empty.

    Returns:
        The loss and the metrics, which carry no gradient. Ranks sum all metrics but two extremes:

        - ``kl0`` to ``kl3``: means of the four estimates.
        - ``kl_avg``: mean of beta times the chosen estimate. ``policy_avg``: mean of w policy.
          ``total_avg``: the sum of the two. In open-instruct ``total_avg`` is a mean over the
          losses of microbatches, in their scale.
        - ``clipfrac``: the share of tokens that are clipped (DAPO: to a larger loss; CISPO: from
          above) and not dropped.
        - ``ratio_mean`` and ``ratio_square_mean``: means of r and r^2. Once they are summed over
          ranks, ``ratio_square_mean - ratio_mean^2`` is the variance over tokens. open-instruct's
          ``ratio_var`` is the variance over the means of microbatches.
        - ``rho_mean``: mean of each token's own rho. ``rho_weight``: mean of w.
        - ``rho_clipfrac``: the share of tokens whose rho a clamp changed, dropped or not.
        - ``rho_drop_frac``, ``rho_drop_low_frac``, ``rho_drop_high_frac``: the shares dropped.
        - ``rho_min`` (ranks take the minimum) and ``rho_max`` (the maximum) of each token's own
          rho: +inf and -inf without a trained token.
    """
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    unfiltered = logprobs if unfiltered_logprobs is None else unfiltered_logprobs
    acting = mask & ~logprobs.isneginf() & ~old_logprobs.isneginf()
    kept = mask & ~unfiltered.isneginf()
    old_logprobs, vllm_logprobs, advantages = (select(mask, x) for x in (old_logprobs, vllm_logprobs, advantages))
    log_ratio = select(acting, logprobs - old_logprobs)
    logprobs = select(acting, logprobs)
    correction = importance_weights(
        old_logprobs=old_logprobs,
        vllm_logprobs=vllm_logprobs,
        advantages=advantages,
        mask=mask,
        sequence=sequence,
        sequences=sequences,
        options=options,
    )
    ratio = select(acting, torch.exp(log_ratio))
    policy, clipped = policy_loss(logprobs, ratio, advantages, options)
    policy = select(acting, correction.weight * policy)
    kls = kl_estimates(select(kept, unfiltered - reference_logprobs), ratio)
    penalty = options.beta * kls[options.kl_estimator]

    denominator = (
        valid_tokens
        if options.loss_denominator == "token"
        else torch.tensor(options.loss_denominator, dtype=logprobs.dtype)
    )
    loss = options.loss_scale * token_mean(policy + penalty, mask, denominator)
    if not with_metrics:
        return loss, {}

    counted = acting & ~correction.dropped_low & ~correction.dropped_high
    averaged = {f"kl{k}": kl for k, kl in enumerate(kls)} | rho_statistics(correction)
    averaged |= {"kl_avg": penalty, "policy_avg": policy, "total_avg": policy + penalty}
    averaged |= {"clipfrac": clipped & counted, "ratio_mean": ratio, "ratio_square_mean": ratio**2}
    totals = torch.where(mask, torch.stack([x.detach().to(loss.dtype) for x in averaged.values()]), 0.0).sum(dim=1)
    metrics = dict(zip(averaged, divide(totals, valid_tokens), strict=True))
    return loss, metrics | {"rho_min": smallest(correction.rho, mask), "rho_max": largest(correction.rho, mask)}


def rho_statistics(correction: Rho) -> dict[str, Tensor]:
    """Returns the per-token values ``[tokens]`` that the metrics of rho average, by metric name."""
    return {
        "rho_mean": correction.rho,
        "rho_weight": correction.weight,
        "rho_clipfrac": correction.clamped,
        "rho_drop_frac": correction.dropped_low | correction.dropped_high,
        "rho_drop_low_frac": correction.dropped_low,
        "rho_drop_high_frac": correction.dropped_high,
    }


def policy_loss(
    logprobs: Float[Tensor, " tokens"],
    ratio: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    options: Any,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """Computes the policy loss of each token, without its weight w.

    Args:
        logprobs: log p ``[tokens]``, in nats.
        ratio: r ``[tokens]``.
        advantages: A ``[tokens]``.
        options: The options of ``lossgate.options.GrpoOptions``, as attributes.

    Returns:
        The losses ``[tokens]``, and whether each is clipped ``[tokens]``.
    """
    highest = 1 + options.clip_higher
    if options.loss_fn == "cispo":
        return -advantages * torch.clamp(ratio.detach(), max=highest) * logprobs, ratio > highest
    free, clipped = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - options.clip_lower, highest)
    return torch.maximum(free, clipped), clipped > free


def kl_estimates(
    log_ratio: Float[Tensor, " tokens"], ratio: Float[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], ...]:
    """Computes four estimates of KL(p || p_ref) at each token.

    Estimates 0, 1 and 2 are Schulman's k1, k2 and k3; estimate 3 is k1 with the importance weight
    r. On-policy and unclamped, the values of 0, 2 and 3 have the mean KL(p || p_ref). The gradients
    have the means 0 for estimate 0, grad KL(p || p_ref) for 1 and 3, and grad KL(p_ref || p) for 2.

    Args:
        log_ratio: log p - log p_ref ``[tokens]``, in nats.
        ratio: r ``[tokens]``.

    Returns:
        The four estimates, each ``[tokens]``, in nats.
    """
    d = torch.clamp(log_ratio, -KL_BOUND, KL_BOUND)
    return d, d**2 / 2, torch.expm1(-d) + d, ratio * d
