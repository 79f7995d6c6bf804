# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimisation, with the policy losses of DAPO and CISPO: the objective of open-instruct.

With r = p / p_old, A the advantage, w the weight of ``importance_weights``, d = clamp(log p - log p_ref, -40, 40):

    DAPO:   policy = max(-A r, -A clamp(r, 1 - clip_lower, 1 + clip_higher))
    CISPO:  policy = -A min(sg(r), 1 + clip_higher) log p                       sg: no gradient flows through
    kl:     0: d     1: d^2 / 2     2: expm1(-d) + d     3: r d
    L = loss_scale * sum_t m_t (w policy + beta kl) / D

D is the number of trained tokens of the whole batch, or a constant. CISPO clips above alone; NeMo-RL's also below. Where d
is clamped it has no gradient, but estimator 3 keeps that of its r. The temperature divides logits, upstream of this.

open-instruct ``compute_grpo_loss`` and its tiled twin, whose bugs are not followed: the twin divides by at least 1, also where D is a
smaller constant, and multiplies masked values by zero, so that infinities there spoil the batch (here they are selected away).
Earlier versions of the twin reported no clipping by CISPO, and ignored rho and the choice of estimator. See rho.py for more.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import divide, largest, select, smallest, token_mean
from dense_losses.rho import Rho, RhoOptions, importance_weights

KL_BOUND = 40.0  # in nats, open-instruct's


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(RhoOptions):
    """The options of ``grpo``, with those of ``importance_weights``; names and defaults are open-instruct's."""

    loss_fn: Literal["dapo", "cispo"] = "dapo"
    """The policy loss."""
    clip_lower: float = 0.2
    """The ratio is clipped below at 1 - clip_lower, by DAPO alone. ``ratio_clip_min`` in NeMo-RL."""
    clip_higher: float = 0.272
    """The ratio is clipped above at 1 + clip_higher. ``ratio_clip_max`` in NeMo-RL."""
    beta: float = 0.05
    """The factor of the KL term; 0 also for want of a reference policy, with any finite ``reference_logprobs``."""
    kl_estimator: Literal[0, 1, 2, 3] = 2
    """Which estimate of KL(p || p_ref) is the KL term."""
    loss_denominator: Literal["token"] | float = "token"
    """D: ``"token"`` for the number of trained tokens of the whole batch, or a positive constant, which Dr. GRPO has."""
    loss_scale: int = 1
    """The factor of the loss, not of metrics. ``world_size // sequence_parallel_size`` in open-instruct: DeepSpeed averages over
    data-parallel ranks, so that each must have that many times its part for the average to be the batch's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_fn not in ("dapo", "cispo"):
            raise ValueError(f"loss_fn is {self.loss_fn!r}; expected dapo or cispo")
        if not 0 <= self.clip_lower <= 1:
            raise ValueError(f"clip_lower is {self.clip_lower!r}; expected a number between 0 and 1")
        for name in ("clip_higher", "beta"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a finite number, 0 or larger")
        if self.kl_estimator not in (0, 1, 2, 3):
            raise ValueError(f"kl_estimator is {self.kl_estimator!r}; expected 0, 1, 2 or 3")
        if self.loss_denominator != "token" and (
            isinstance(self.loss_denominator, str) or not 0 < self.loss_denominator < float("inf")
        ):
            raise ValueError(
                f"loss_denominator is {self.loss_denominator!r}; expected 'token' or a finite positive number"
            )
        if not isinstance(self.loss_scale, int) or self.loss_scale < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"loss_scale is {self.loss_scale!r}; expected a positive integer")


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
    options: GrpoOptions,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The loss, differentiable in ``logprobs``.

    old_logprobs: None means on-policy, those of ``logprobs`` without their gradient: the ratio is 1, its gradient is not 0.
    vllm_logprobs: NaN at a trained token means no correction, rho = 1. Without ``use_rho_correction`` they have an effect on metrics alone.
    sequence: sequences must be whole for rho's means over them (``rho_mask_sequence_level``, ``rho_mask_tv_divergence``), and each is one
        document; open-instruct averages over the documents of a packed row together.
    valid_tokens: the number of trained tokens, over every rank and microbatch. Metrics are divided by it whatever D is.

    Metrics, each the sum over ranks of what they return, but for two extremes:

    - ``kl0`` .. ``kl3``, the means of the estimates; ``kl_avg``, beta times that of the chosen one; ``policy_avg``, of w policy; ``total_avg``,
      the sum of the two. In open-instruct ``total_avg`` is a mean of microbatches' losses, in the scale of those.
    - ``clipfrac``, the share of tokens that are clipped, in DAPO to a larger loss, in CISPO from above, and not dropped.
    - ``ratio_mean`` and ``ratio_square_mean``, of r and r^2. Once they are summed over ranks, ``ratio_square_mean - ratio_mean^2`` is
      the variance over tokens; ``ratio_var`` of open-instruct is that of microbatches' means.
    - ``rho_mean``, of tokens' own rho; ``rho_weight``, of w; ``rho_clipfrac``, the share whose rho a clamp changed, dropped or not;
      ``rho_drop_frac``, ``rho_drop_low_frac`` and ``rho_drop_high_frac``, the shares dropped.
    - ``rho_min`` (min over ranks) and ``rho_max`` (max), of tokens' own rho, +inf and -inf without a trained token.
    """
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    inputs = (logprobs, old_logprobs, reference_logprobs, vllm_logprobs, advantages)
    logprobs, old_logprobs, reference_logprobs, vllm_logprobs, advantages = (select(mask, x) for x in inputs)
    correction = importance_weights(
        old_logprobs=old_logprobs,
        vllm_logprobs=vllm_logprobs,
        advantages=advantages,
        mask=mask,
        sequence=sequence,
        sequences=sequences,
        options=options,
    )
    ratio = torch.exp(logprobs - old_logprobs)
    policy, clipped = policy_loss(logprobs, ratio, advantages, options)
    policy = correction.weight * policy
    kls = kl_estimates(logprobs - reference_logprobs, ratio)
    penalty = options.beta * kls[options.kl_estimator]

    denominator = (
        valid_tokens
        if options.loss_denominator == "token"
        else torch.tensor(options.loss_denominator, dtype=logprobs.dtype)
    )
    loss = options.loss_scale * token_mean(policy + penalty, mask, denominator)

    kept = ~correction.dropped_low & ~correction.dropped_high
    averaged = {f"kl{k}": kl for k, kl in enumerate(kls)} | rho_statistics(correction)
    averaged |= {"kl_avg": penalty, "policy_avg": policy, "total_avg": policy + penalty}
    averaged |= {"clipfrac": clipped & kept, "ratio_mean": ratio, "ratio_square_mean": ratio**2}
    totals = torch.where(mask, torch.stack([x.detach().to(loss.dtype) for x in averaged.values()]), 0.0).sum(dim=1)
    metrics = dict(zip(averaged, divide(totals, valid_tokens), strict=True))
    return loss, metrics | {"rho_min": smallest(correction.rho, mask), "rho_max": largest(correction.rho, mask)}


def rho_statistics(correction: Rho) -> dict[str, Tensor]:
    """What the metrics of rho are means of."""
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
    options: GrpoOptions,
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """The policy loss of each token, without its weight, and whether it is clipped."""
    highest = 1 + options.clip_higher
    if options.loss_fn == "cispo":
        return -advantages * torch.clamp(ratio.detach(), max=highest) * logprobs, ratio > highest
    free, clipped = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - options.clip_lower, highest)
    return torch.maximum(free, clipped), clipped > free


def kl_estimates(
    log_ratio: Float[Tensor, " tokens"], ratio: Float[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], ...]:
    """Four estimates of KL(p || p_ref) at each token from ``log_ratio``, log p - log p_ref; in nats.

    Schulman's k1, k2 and k3, and k1 with the importance weight ``ratio``. On-policy and unclamped, 0, 2 and 3 have the mean KL(p || p_ref), but
    it is the gradients of 1 and 3 that have its gradient for their mean; that of 0 has the mean 0, that of 2 the gradient of KL(p_ref || p).
    """
    d = torch.clamp(log_ratio, -KL_BOUND, KL_BOUND)
    return d, d**2 / 2, torch.expm1(-d) + d, ratio * d
