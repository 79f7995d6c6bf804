# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimisation (GRPO) on log-probabilities of single tokens.

The policy loss is DAPO or CISPO.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import (
    as_count,
    as_mask,
    check_choice,
    check_constants,
    check_integer,
    check_setting,
    check_tokens,
)
from fused_losses.metrics import Metrics
from fused_losses.names import named
from fused_losses.numerics import bounded_exp, divisor
from fused_losses.rho import RhoCorrection, RhoWeights, given_weights, rho_weights

_LARGEST_KL = 40.0
"""Bound of the log-ratio to the reference, in nats, as in open-instruct."""


@named
def grpo_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor,
    valid_tokens: Tensor | float,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    vllm_logprobs: Tensor | None = None,
    unfiltered_logprobs: Tensor | None = None,
    sequence: Tensor | None = None,
    sequences: int | None = None,
    loss_fn: Literal["dapo", "cispo"] = "dapo",
    clip_lower: float = 0.2,
    clip_higher: float = 0.272,
    beta: float = 0.05,
    kl_estimator: Literal[0, 1, 2, 3] = 2,
    rho: RhoCorrection | RhoWeights | Tensor | None = None,
    loss_denominator: Literal["token"] | float = "token",
    loss_scale: int = 1,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Metrics]:
    """Computes the GRPO objective of open-instruct, with the policy loss of DAPO or CISPO.

    The loss is ``loss_scale sum_t m_t (w_t policy_t + beta kl_t) / D``, where m is the mask and w
    the weight from ``rho``. D is ``valid_tokens``, or the number ``loss_denominator``, which may be
    below 1. With ``linear_logprobs`` in front, it replaces open-instruct's tiled lm-head loss.

    Args:
        logprobs: ``[tokens]``, log-probabilities of the labels of this rank's tokens; gradients
            flow.
        advantages: ``[tokens]``.
        mask: ``[tokens]`` of bool, or of numbers 0 and 1: the tokens that count. Values at other
            tokens have no effect, not even NaN or infinity.
        valid_tokens: the number of tokens that count in the whole batch, over every rank and
            microbatch: a number, or a tensor with one number. Losses, gradients and metrics of
            ranks and microbatches then add up.
        old_logprobs: ``[tokens]``, under the policy before the update; ``logprobs`` by default.
        reference_logprobs: ``[tokens]``, under the reference policy; needed unless ``beta`` is 0.
        vllm_logprobs: ``[tokens]``, from the engine that sampled; needed with a ``RhoCorrection``.
            A token for which it is not known has NaN, and is not corrected.
        unfiltered_logprobs: ``[tokens]``, ``logprobs`` without top-k and top-p filtering, for the
            KL estimates; gradients flow; by default ``logprobs``. A label that the filter leaves
            out, now or before the update, has -inf; its token has no policy loss, and a ratio of 0.
        sequence: ``[tokens]`` integers, each token's sequence; needed if ``rho`` has
            ``rho_mask_sequence_level`` or ``rho_mask_tv_divergence``.
        sequences: the number of sequences in the pack; needed with ``sequence``.
        loss_fn: ``"dapo"`` or ``"cispo"``.
        clip_lower: the ratio is clipped from below at ``1 - clip_lower``, by DAPO alone.
        clip_higher: the ratio is clipped from above at ``1 + clip_higher``.
        beta: weight of the KL estimate.
        kl_estimator: with d = log p - log p_ref, bounded to 40 nats, and the ratio r of the policy
            to the old policy: 0 is d, 1 is d^2 / 2, 2 is exp(-d) - 1 + d, 3 is r d.
        rho: the correction for the engine that sampled; None for no correction. Or the weights of
            the correction, from ``rho_weights`` or as a tensor ``[tokens]``; then
            ``vllm_logprobs``, ``sequence`` and ``sequences`` are not used.
        loss_denominator: ``"token"`` for ``valid_tokens``, or a positive number.
        loss_scale: factor of the loss, a positive integer. Trainers that average over data-parallel
            ranks pass their number.
        cp_group: the ranks over which the tokens of sequences are split.

    Returns:
        This rank's part of the loss, a scalar, and of ``Metrics``. The metrics
        ``kl0 .. kl3``, ``kl_avg``, ``policy_avg``, ``total_avg``, ``clipfrac``, ``ratio_mean``,
        ``ratio_square_mean``, ``rho_mean``, ``rho_weight``, ``rho_clipfrac``, ``rho_drop_frac``,
        ``rho_drop_low_frac`` and ``rho_drop_high_frac`` are parts of means over ``valid_tokens``,
        so they are sums. ``rho_min`` and ``rho_max`` are reduced by minimum and maximum; they are
        infinite without tokens. If ``rho`` is a tensor of weights, only ``rho_weight`` and
        ``rho_drop_frac`` of the metrics of rho are known.

    Raises:
        ValueError: An argument is missing or does not fit; the message names it.

    Collectives:
        Forward: one all-reduce SUM of ``[3, sequences]`` over ``cp_group`` if ``rho`` averages over
        sequences; else none. Backward: none.
    """
    _check_settings(loss_fn, kl_estimator, clip_lower, clip_higher, beta, loss_denominator, loss_scale)
    _check_policies(rho, beta, reference_logprobs, vllm_logprobs)
    if sequences is not None:
        check_integer("sequences", sequences, least=0)
    policies = {"old_logprobs": old_logprobs, "reference_logprobs": reference_logprobs, "vllm_logprobs": vllm_logprobs}
    optional = {**policies, "unfiltered_logprobs": unfiltered_logprobs, "sequence": sequence}
    check_tokens({"logprobs": logprobs, "advantages": advantages}, optional)
    check_constants({**policies, "advantages": advantages})
    mask = as_mask("mask", mask, logprobs)
    count = divisor(as_count("valid_tokens", valid_tokens, logprobs, mask.sum()))
    select = _Select(mask, logprobs.dtype)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    acts = _Select(mask & (logprobs != -torch.inf) & (old != -torch.inf), logprobs.dtype)
    new, advantages, old = acts(logprobs), select(advantages), select(old)
    if isinstance(rho, RhoWeights | Tensor):
        weights = given_weights(rho, logprobs, mask)
    else:
        weights = rho_weights(
            rho or RhoCorrection(use_rho_correction=False),
            old_logprobs=old,
            vllm_logprobs=old if vllm_logprobs is None else vllm_logprobs,
            advantages=advantages,
            mask=mask,
            sequence=sequence,
            sequences=sequences,
            cp_group=cp_group,
        )
    ratio = acts(bounded_exp(new - acts(old)))
    policy, is_clipped = _policy_loss(new, ratio, advantages, loss_fn, clip_lower, clip_higher)
    u = logprobs if unfiltered_logprobs is None else unfiltered_logprobs
    kept = _Select(mask & (u != -torch.inf), logprobs.dtype)
    estimates = _kl_estimates(kept(u), ratio, kept(u.detach() if reference_logprobs is None else reference_logprobs))
    weight = select(weights.weight)
    weighted, kl = acts(weight * policy), beta * estimates[kl_estimator]

    def mean(x: Tensor) -> Tensor:
        return select(x.detach()).sum() / count

    total = select(weighted + kl).sum()
    loss = loss_scale * total / (count if loss_denominator == "token" else loss_denominator)
    detached = ratio.detach()
    metrics = {f"kl{k}": mean(estimate) for k, estimate in enumerate(estimates)}
    metrics |= {"kl_avg": mean(kl), "policy_avg": mean(weighted), "total_avg": mean(weighted + kl)}
    metrics |= {
        "clipfrac": mean(acts((is_clipped & (weight != 0)).to(new.dtype))),
        "ratio_mean": mean(detached),
        "ratio_square_mean": mean(detached.square()),
    }
    metrics |= weights.means(mask, count)
    minima, maxima = ([name] if name in metrics else [] for name in ("rho_min", "rho_max"))
    normalisers = dict.fromkeys(metrics.keys() - {"rho_min", "rho_max"}, "valid_tokens")
    return loss, Metrics(metrics, minima=minima, maxima=maxima, normalisers=normalisers)


class _Select:
    """Replaces the values of tokens that do not count by 0. Multiplying by 0 would keep NaN."""

    def __init__(self, mask: Tensor, dtype: torch.dtype) -> None:
        self._mask, self._dtype = mask, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(self._mask, x.to(self._dtype), 0.0)


def _policy_loss(
    new: Tensor, ratio: Tensor, advantages: Tensor, loss_fn: str, lower: float, higher: float
) -> tuple[Tensor, Tensor]:
    """Computes the policy loss of each token without its weight, and whether it is clipped."""
    if loss_fn == "cispo":
        return -advantages * ratio.detach().clamp(max=1 + higher) * new, ratio > 1 + higher
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - lower, 1 + higher)
    return torch.maximum(plain, clipped), clipped > plain


def _kl_estimates(new: Tensor, ratio: Tensor, reference: Tensor) -> list[Tensor]:
    """Computes the estimates 0 to 3 of the KL divergence from the reference."""
    d = (new - reference).clamp(-_LARGEST_KL, _LARGEST_KL)
    return [d, d.square() / 2, torch.expm1(-d) + d, ratio * d]


def _check_settings(
    loss_fn: str, kl_estimator: int, lower: float, higher: float, beta: float, denominator: str | float, scale: int
) -> None:
    check_choice("loss_fn", loss_fn, ("dapo", "cispo"))
    check_choice("kl_estimator", kl_estimator, (0, 1, 2, 3))
    check_setting("clip_lower", lower, least=0, largest=1)
    check_setting("clip_higher", higher, least=0)
    check_setting("beta", beta, least=0)
    check_setting("loss_denominator", denominator, above=0, also=("token",), otherwise="or 'token'")
    check_integer("loss_scale", scale, least=1)


def _check_policies(rho: Any, beta: float, reference: Tensor | None, vllm: Tensor | None) -> None:
    if beta and reference is None:
        raise ValueError(
            f"reference_logprobs is missing: expected [T] with beta {beta}; without a reference policy give beta=0"
        )
    if not isinstance(rho, RhoCorrection | RhoWeights | Tensor | None):
        raise ValueError(
            f"rho {rho!r}: expected RhoCorrection, the result of rho_weights, a tensor of weights, or None"
        )
    if isinstance(rho, RhoCorrection) and rho.use_rho_correction and vllm is None:
        raise ValueError("vllm_logprobs is missing: expected [T] with RhoCorrection; without them give rho=None")
