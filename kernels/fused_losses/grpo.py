# SPDX-License-Identifier: Apache-2.0
"""Group relative policy optimisation (GRPO) on log-probabilities of single tokens.

The policy loss is that of DAPO or CISPO.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.numerics import bounded_exp, check_tokens
from fused_losses.ranks import sum_over

_LARGEST_KL, _LARGEST_RHO = 40.0, 10.0
"""Bounds, in nats, of log-ratios to the reference and to the sampler, as in open-instruct."""


@dataclass(frozen=True, kw_only=True)
class RhoCorrection:
    """Weights of the policy loss that correct for the engine that sampled the tokens.

    That engine's policy is not quite the old policy. rho is p_old / p_sampler. The policy loss of a
    token has the weight rho, clamped to ``[clamp_lower, clamp_upper]``; the token is dropped if rho
    is outside of ``[mask_lower, mask_upper]``. A bound of 0 is disabled.
    """

    clamp_lower: float = 0.0
    """Lower bound of the weight."""
    clamp_upper: float = 2.0
    """Upper bound of the weight."""
    mask_lower: float = 0.0
    """Tokens with a smaller rho are dropped."""
    mask_upper: float = 0.0
    """Tokens with a larger rho are dropped."""
    sequence_level: bool = False
    """rho is the geometric mean over the token's sequence."""
    tv_divergence: bool = False
    """The mask bounds apply to the mean of ``|rho - 1|`` over the token's sequence instead.

    Only tokens whose own update would increase that mean are dropped.
    """


def grpo_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    mask: Tensor,
    valid_tokens: Tensor | int,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    sampler_logprobs: Tensor | None = None,
    unfiltered_logprobs: Tensor | None = None,
    sequence: Tensor | None = None,
    sequences: int | None = None,
    loss_fn: Literal["dapo", "cispo"] = "dapo",
    clip_lower: float = 0.2,
    clip_higher: float = 0.272,
    beta: float = 0.05,
    kl_estimator: Literal[0, 1, 2, 3] = 2,
    rho: RhoCorrection | None = None,
    loss_denominator: Literal["token"] | float = "token",
    loss_scale: float = 1.0,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the GRPO objective of open-instruct, with the policy loss of DAPO or CISPO.

    The loss is ``loss_scale sum_t m_t (w_t policy_t + beta kl_t) / D``, where m is the mask and w
    the weight from ``rho``. D is ``valid_tokens``, or the number ``loss_denominator``, which may be
    below 1. With ``linear_logprobs`` in front, it replaces open-instruct's tiled lm-head loss.

    Args:
        logprobs: ``[tokens]``, log-probabilities of the labels of this rank's tokens; gradients
            flow.
        advantages: ``[tokens]``.
        mask: ``[tokens]`` bool, the tokens that count. Values at other tokens have no effect, not
            even NaN or infinity.
        valid_tokens: the number of tokens that count in the whole batch, over every rank and
            microbatch. Losses, gradients and metrics of those then add up.
        old_logprobs: ``[tokens]``, those of the policy before the update; ``logprobs`` by default.
        reference_logprobs: ``[tokens]``; needed unless ``beta`` is 0.
        sampler_logprobs: ``[tokens]``, those of the engine that sampled; needed with ``rho``. NaN
            where they are not known; there is no correction there.
        unfiltered_logprobs: ``[tokens]``, ``logprobs`` without top-k and top-p filtering, for the
            KL estimates; gradients flow; by default ``logprobs``. A label that the filter leaves
            out, now or before the update, has -inf; its token has no policy loss, and a ratio of 0.
        sequence: ``[tokens]`` integers, each token's sequence; needed if ``rho`` has
            ``sequence_level`` or ``tv_divergence``.
        sequences: the number of sequences in the pack; needed with ``sequence``.
        loss_fn: ``"dapo"`` or ``"cispo"``.
        clip_lower: the ratio is clipped from below at ``1 - clip_lower``, by DAPO alone.
        clip_higher: the ratio is clipped from above at ``1 + clip_higher``.
        beta: weight of the KL estimate.
        kl_estimator: with d = log p - log p_ref, bounded to 40 nats, and the ratio r of the policy
            to the old policy: 0 is d, 1 is d^2 / 2, 2 is exp(-d) - 1 + d, 3 is r d.
        rho: the correction for the engine that sampled; None for none.
        loss_denominator: ``"token"`` for ``valid_tokens``, or a positive number.
        loss_scale: factor of the loss. Trainers that average over data-parallel ranks pass their
            number.
        cp_group: the ranks over which the tokens of sequences are split.

    Returns:
        This rank's part of the loss, a scalar, and of metrics without gradients. The metrics
        ``kl0 .. kl3``, ``kl_avg``, ``policy_avg``, ``total_avg``, ``clipfrac``, ``ratio_mean``,
        ``ratio_square_mean``, ``rho_mean``, ``rho_weight``, ``rho_clipfrac``, ``rho_drop_frac``,
        ``rho_drop_low_frac`` and ``rho_drop_high_frac`` are parts of means over ``valid_tokens``,
        to be summed over ranks. ``rho_min`` and ``rho_max`` are to be reduced by minimum and
        maximum; they are infinite without tokens.

    Raises:
        ValueError: An argument is missing or does not fit; the message names it.

    Collectives:
        Forward: one all-reduce SUM of ``[3, sequences]`` over ``cp_group`` if ``rho`` averages over
        sequences; else none. Backward: none.
    """
    tokens = {"advantages": advantages, "mask": mask, "old_logprobs": old_logprobs, "sequence": sequence}
    check_tokens(logprobs, **tokens, reference_logprobs=reference_logprobs, sampler_logprobs=sampler_logprobs)
    check_tokens(logprobs, unfiltered_logprobs=unfiltered_logprobs)
    _check(
        loss_fn, kl_estimator, beta, loss_denominator, reference_logprobs, sampler_logprobs, sequence, sequences, rho
    )
    select = _Select(mask, logprobs.dtype)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    acts = _Select(mask & (logprobs != -torch.inf) & (old != -torch.inf), logprobs.dtype)
    new, advantages, old = acts(logprobs), select(advantages), select(old)
    ratio = acts(bounded_exp(new - acts(old)))
    if loss_fn == "dapo":
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip_lower, 1 + clip_higher)
        policy, is_clipped = torch.maximum(plain, clipped), clipped > plain
    else:
        policy = -advantages * ratio.detach().clamp(max=1 + clip_higher) * new
        is_clipped = ratio > 1 + clip_higher
    x = torch.zeros_like(old) if sampler_logprobs is None else _log_rho(old.detach(), select(sampler_logprobs), mask)
    weights = _Weights.none(x.exp()) if rho is None else _weigh(x, advantages, mask, sequence, sequences, rho, cp_group)
    u = logprobs if unfiltered_logprobs is None else unfiltered_logprobs
    kept = _Select(mask & (u != -torch.inf), logprobs.dtype)
    q = u.detach() if reference_logprobs is None else reference_logprobs
    estimates = _kl_estimates(kept(u), ratio, kept(q))
    weighted, kl = acts(weights.weight * policy), beta * estimates[kl_estimator]
    count = torch.as_tensor(valid_tokens, dtype=new.dtype, device=new.device).clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return select(x.detach()).sum() / count

    total = select(weighted + kl).sum()
    loss = loss_scale * total / (count if loss_denominator == "token" else loss_denominator)
    detached = ratio.detach()
    metrics = {f"kl{k}": mean(estimate) for k, estimate in enumerate(estimates)}
    metrics |= {"kl_avg": mean(kl), "policy_avg": mean(weighted), "total_avg": mean(weighted + kl)}
    metrics |= {
        "clipfrac": mean(acts((is_clipped & ~weights.dropped).to(new.dtype))),
        "ratio_mean": mean(detached),
        "ratio_square_mean": mean(detached.square()),
    }
    return loss, metrics | weights.metrics(mean, mask)


_Mean = Callable[[Tensor], Tensor]


class _Select:
    """Replaces values of tokens that do not count by 0.

    Multiplying by 0 would keep NaN.
    """

    def __init__(self, mask: Tensor, dtype: torch.dtype) -> None:
        self._mask, self._dtype = mask, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where(self._mask, x.to(self._dtype), 0.0)


def _kl_estimates(new: Tensor, ratio: Tensor, reference: Tensor) -> list[Tensor]:
    """Computes the estimates 0 to 3 of the KL divergence from the reference."""
    d = (new - reference).clamp(-_LARGEST_KL, _LARGEST_KL)
    return [d, d.square() / 2, torch.expm1(-d) + d, ratio * d]


@dataclass(frozen=True)
class _Weights:
    """Weights of the policy loss, ``[tokens]`` each, without gradients."""

    own: Tensor
    """rho of the token itself."""
    weight: Tensor
    clamped: Tensor
    """Bool: the weight was clamped."""
    low: Tensor
    """Bool: the token was dropped because rho was too small."""
    high: Tensor
    """Bool: the token was dropped because rho was too large."""

    @classmethod
    def none(cls, own: Tensor) -> "_Weights":
        nothing = torch.zeros_like(own, dtype=torch.bool)
        return cls(own, torch.ones_like(own), nothing, nothing, nothing)

    @property
    def dropped(self) -> Tensor:
        return self.low | self.high

    def metrics(self, mean: _Mean, mask: Tensor) -> dict[str, Tensor]:
        shares = {
            "rho_clipfrac": self.clamped,
            "rho_drop_frac": self.dropped,
            "rho_drop_low_frac": self.low,
            "rho_drop_high_frac": self.high,
        }
        infinity = self.own.new_full((1,), float("inf"))
        return {
            "rho_mean": mean(self.own),
            "rho_weight": mean(self.weight),
            **{name: mean(share.to(self.own.dtype)) for name, share in shares.items()},
            "rho_min": torch.cat([infinity, torch.where(mask, self.own, infinity)]).amin(),
            "rho_max": torch.cat([-infinity, torch.where(mask, self.own, -infinity)]).amax(),
        }


def _log_rho(old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """Computes log p_old - log p_sampler; 0 where the sampler's log-probability is NaN."""
    return torch.where(mask & ~sampler.isnan(), (old - sampler).clamp(-_LARGEST_RHO, _LARGEST_RHO), 0.0)


def _weigh(
    x: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor | None,
    sequences: int | None,
    o: RhoCorrection,
    group: dist.ProcessGroup | None,
) -> _Weights:
    own = x.exp()
    rho = bounded = own
    droppable = mask
    if (o.sequence_level or o.tv_divergence) and sequence is not None and sequences is not None:
        per_token = torch.where(mask, torch.stack([x, (own - 1).abs(), torch.ones_like(x)]), 0.0)
        sums = sum_over(group, x.new_zeros(3, sequences).index_add(1, sequence, per_token))
        mean_x, tv = (sums[:2] / sums[2].clamp(min=1))[:, sequence]
        rho = bounded = mean_x.exp() if o.sequence_level else own
        if o.tv_divergence:
            bounded, droppable = tv, mask & (x.sign() * advantages > 0)
    low = droppable & (bounded < o.mask_lower) if o.mask_lower else torch.zeros_like(mask)
    high = droppable & (bounded > o.mask_upper) if o.mask_upper else torch.zeros_like(mask)
    weight = rho.clamp(o.clamp_lower or None, o.clamp_upper or None) if o.clamp_lower or o.clamp_upper else rho
    return _Weights(own, torch.where(low | high, 0.0, weight), mask & (weight != rho), low, high)


def _check(
    loss_fn: str,
    kl_estimator: int,
    beta: float,
    denominator: str | float,
    reference: Tensor | None,
    sampler: Tensor | None,
    sequence: Tensor | None,
    sequences: int | None,
    rho: RhoCorrection | None,
) -> None:
    if loss_fn not in ("dapo", "cispo"):
        raise ValueError(f"loss_fn {loss_fn!r}: expected 'dapo' or 'cispo'")
    if kl_estimator not in (0, 1, 2, 3):
        raise ValueError(f"kl_estimator {kl_estimator!r}: expected 0, 1, 2 or 3")
    if denominator != "token" and (isinstance(denominator, str) or not denominator > 0):
        raise ValueError(f"loss_denominator {denominator!r}: expected 'token' or a positive number")
    if beta and reference is None:
        raise ValueError(
            f"reference_logprobs is missing: expected [T] with beta {beta}; without a reference policy give beta=0"
        )
    if rho is not None and sampler is None:
        raise ValueError("sampler_logprobs is missing: expected [T] with rho; without them give rho=None")
    if rho is not None and (rho.sequence_level or rho.tv_divergence) and (sequence is None or sequences is None):
        raise ValueError(
            "sequence or sequences is missing: expected [T] integers and the number of sequences with "
            "sequence_level or tv_divergence; pass both, or set these options of rho to False"
        )
