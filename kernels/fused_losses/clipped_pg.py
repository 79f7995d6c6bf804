# SPDX-License-Identifier: Apache-2.0
"""The clipped policy gradient on log-probabilities of single tokens.

It covers PPO, GRPO, DAPO, REINFORCE, GSPO and CISPO; clipped_pg_config.py has its options.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import (
    as_counts,
    as_mask,
    as_sample_mask,
    as_sequence,
    check_constants,
    check_device,
    check_tokens,
)
from fused_losses.clipped_pg_config import ClippedPGConfig
from fused_losses.metrics import Metrics
from fused_losses.names import named
from fused_losses.numerics import bounded_exp, divisor
from fused_losses.ranks import is_first, sum_over_for_parts


@named
def clipped_pg_loss(
    logprobs: Tensor,
    *,
    generation_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    sample_mask: Tensor,
    valid_tokens: Tensor | float,
    valid_sequences: Tensor | float,
    config: ClippedPGConfig,
    prev_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    unfiltered_logprobs: Tensor | None = None,
    rewards: Tensor | None = None,
    positive_tokens: Tensor | float | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Metrics]:
    """Computes the clipped policy gradient loss and its metrics for a pack of sequences.

    The formulas are those of NeMo-RL's ``ClippedPGLossFn``; see ``ClippedPGConfig``.

    Args:
        logprobs: ``[tokens]``, log-probabilities of the labels of this rank's tokens, from
            ``linear_logprobs``; gradients flow. A token that top-k or top-p filtering leaves out
            has -inf here; it is not part of the policy loss, unless ``filtered_tokens`` says so.
        generation_logprobs: ``[tokens]``, under the policy that generated the tokens.
        advantages: ``[tokens]``.
        mask: ``[tokens]`` of bool, or of numbers 0 and 1: the tokens that count. Values at other
            tokens have no effect.
        sequence: ``[tokens]`` integers, each token's sequence in the pack.
        sample_mask: ``[sequences]`` of bool, or of numbers 0 and 1: the sequences that count.
        valid_tokens: the number of tokens that count in the whole batch, over every rank and
            microbatch: a number, or a tensor with one number.
        valid_sequences: the number of sequences that count in the whole batch.
        config: the options.
        prev_logprobs: ``[tokens]``, log-probabilities under the policy before the update; needed
            unless ``force_on_policy_ratio``, which does not use them.
        reference_logprobs: ``[tokens]``, under the reference policy; needed with a KL penalty.
        unfiltered_logprobs: ``[tokens]``, ``logprobs`` without filtering, for the KL penalty; by
            default ``logprobs``.
        rewards: ``[sequences]``; needed with ``positive_example_nll_weight``.
        positive_tokens: the number of tokens that count in sequences with a reward above 0, in the
            whole batch; needed with ``positive_example_nll_weight``, unless
            ``positive_nll_normaliser`` is ``"local"``.
        cp_group: the ranks over which the tokens of the pack are split.

    Returns:
        The loss, a scalar, and ``Metrics``. They are this rank's parts and add up over dp, cp and
        microbatches, as do gradients. All metrics are sums, except ``.._min`` and ``.._max``, which
        are reduced by minimum and maximum and are infinite without tokens. ``normalisers`` has the
        count that divides each.
        Metrics: ``kl_penalty`` (reduced like the loss), ``probs_ratio{,_clamped}{,_min,_max}``,
        ``approx_entropy``, ``token_mult_prob_error``, ``gen_kl_error``, ``policy_kl_error``,
        ``js_divergence_error``, ``sampling_importance_ratio``, ``is_oob_ratio`` (with a
        truncation), ``positive_nll_loss`` and ``num_valid_samples``.

    Raises:
        ValueError: An argument is missing or does not fit; the message names it.

    Collectives:
        On ``cp_group``, forward: one all-reduce SUM of ``[5, sequences]`` if an option needs whole
        sequences, else none. Backward: the same once more for GSPO, else none.
    """
    _check(config, prev_logprobs, reference_logprobs, rewards, positive_tokens)
    optional = {"prev_logprobs": prev_logprobs, "reference_logprobs": reference_logprobs}
    check_tokens(
        {
            "logprobs": logprobs,
            "generation_logprobs": generation_logprobs,
            "advantages": advantages,
            "sequence": sequence,
        },
        {**optional, "unfiltered_logprobs": unfiltered_logprobs},
    )
    check_constants({**optional, "generation_logprobs": generation_logprobs, "advantages": advantages})
    mask, sample_mask = as_mask("mask", mask, logprobs), as_sample_mask(sample_mask, logprobs)
    sequence = as_sequence(sequence, mask, len(sample_mask), cp_group)
    _check_rewards(rewards, sample_mask)
    o, c = config, logprobs
    generation_logprobs, advantages = generation_logprobs.to(c.dtype), advantages.to(c.dtype)
    p = c.detach() if o.force_on_policy_ratio or prev_logprobs is None else prev_logprobs.to(c.dtype)
    if o.filtered_tokens == "zero":
        c, p = (x.masked_fill(x == -torch.inf, 0.0) for x in (c, p))
    counted = mask & sample_mask[sequence]
    scored = counted & (p != -torch.inf)
    acting = (scored if o.has_ratio else counted) & (c != -torch.inf)
    u = c if unfiltered_logprobs is None else unfiltered_logprobs
    penalised = counted & (u != -torch.inf)
    log_ratio = _at(acting, c) - _at(acting, p) if o.has_ratio else _at(acting, c)
    log_weight = (_at(scored, p) - _at(scored, generation_logprobs)).detach()
    per_token = torch.stack([log_ratio, log_weight, *(where.to(c.dtype) for where in (acting, scored, penalised))])
    sums = c.new_zeros(5, len(sample_mask)).index_add(1, sequence, per_token)
    sums = sum_over_for_parts(cp_group, sums) if o.of_sequences else sums
    counts: dict[str, tuple[Any, Tensor | None]] = {
        "valid_tokens": (valid_tokens, counted.sum()),
        "valid_sequences": (valid_sequences, (sums[4] > 0).sum()),
    }
    if positive_tokens is not None:
        own = None if rewards is None or not o.counts_positive else (counted & (rewards > 0)[sequence]).sum()
        counts["positive_tokens"] = positive_tokens, own
    of_tokens, of_sequences, *of_positive = as_counts(counts, c)
    tokens = _Tokens(
        log_ratio=log_ratio,
        log_weight=log_weight,
        acting=acting,
        scored=scored,
        penalised=penalised,
        sums=sums,
        sequence=sequence,
        sample_mask=sample_mask,
        counts=(of_tokens, of_sequences),
        epsilon=o.epsilon,
        group=cp_group,
    )
    ratio, clamped = _ratios(tokens, c, o)
    weight, weight_metrics = _weights(tokens, o)
    policy = tokens.reduced(
        weight * _policy_loss(ratio, clamped, _at(acting, c), _at(acting, advantages), o), acting, o.token_level_loss
    )
    loss, kl, nll = policy, torch.zeros_like(policy), torch.zeros_like(policy)
    if o.has_kl and reference_logprobs is not None:
        u, q, g = (_at(tokens.penalised, x.to(c.dtype)) for x in (u, reference_logprobs, generation_logprobs))
        estimates = _kl_penalty(u, q, g, o)
        kl = tokens.reduced(estimates, tokens.penalised, o.token_level_loss)
        loss = loss + o.reference_policy_kl_penalty * kl
    if o.positive_example_nll_weight and rewards is not None:
        positive = of_positive[0] if o.counts_positive else None
        nll = _positive_nll(_at(acting, c), rewards > 0, tokens, positive)
        loss = loss + o.positive_example_nll_weight * nll
    metrics = {
        "kl_penalty": kl,
        "positive_nll_loss": nll,
        "num_valid_samples": sample_mask.sum().to(c.dtype) * is_first(cp_group),
    }
    metrics |= _range("probs_ratio", ratio, tokens) | _range("probs_ratio_clamped", clamped, tokens) | weight_metrics
    metrics |= _distances(_at(acting, c), _at(scored, p), generation_logprobs, tokens, o)
    minima, maxima = ([name for name in metrics if name.endswith(end)] for end in ("_min", "_max"))
    return loss, Metrics(metrics, minima=minima, maxima=maxima, normalisers=_normalisers(metrics, o))


def _normalisers(metrics: Iterable[str], o: ClippedPGConfig) -> dict[str, str]:
    """Returns which count of the whole batch divides each metric."""
    of_loss = "valid_tokens" if o.token_level_loss else "valid_sequences"
    others = {"kl_penalty": of_loss, "positive_nll_loss": "", "num_valid_samples": ""}
    if o.positive_example_nll_weight and o.positive_nll_normaliser == "global":
        others["positive_nll_loss"] = "positive_tokens"
    if o.sequence_level_importance_ratios:
        others["sampling_importance_ratio"] = "valid_sequences"
    if o.truncated_importance_sampling_type == "seq-mask-tis":
        others["is_oob_ratio"] = "valid_sequences"
    found = {name: others.get(name, "valid_tokens") for name in metrics if not name.endswith(("_min", "_max"))}
    return {name: count for name, count in found.items() if count}


def _at(where: Tensor, x: Tensor) -> Tensor:
    """Returns x where the condition holds, else 0. Multiplying by 0 would keep NaN."""
    return torch.where(where, x, 0.0)


@dataclass(frozen=True)
class _Tokens:
    """This rank's tokens, and how to average over them and over their sequences.

    Tensors are ``[tokens]``, unless said otherwise.
    """

    log_ratio: Tensor
    """c - p of acting tokens; c if there is no ratio."""
    log_weight: Tensor
    """p - g of scored tokens."""
    acting: Tensor
    """Bool: the token is part of the policy loss."""
    scored: Tensor
    """Bool: the token counts and p is not -inf, so that it has an importance weight."""
    penalised: Tensor
    """Bool: the token is part of the KL penalty."""
    sums: Tensor
    """``[5, sequences]``: the sums of the five fields above over each sequence.

    They cover this rank's tokens, or all ranks' tokens if an option needs whole sequences.
    """
    sequence: Tensor
    sample_mask: Tensor
    """``[sequences]`` bool."""
    counts: tuple[Tensor, Tensor]
    """The numbers of tokens and of sequences that count in the whole batch."""
    epsilon: float
    group: dist.ProcessGroup | None

    def divisor(self, count: Tensor) -> Tensor:
        return divisor(count, self.epsilon)

    def total(self, x: Tensor, where: Tensor) -> Tensor:
        return _at(where, x).sum()

    def mean(self, x: Tensor, where: Tensor) -> Tensor:
        """Computes this rank's part of the mean over all tokens that count."""
        return self.total(x, where) / self.divisor(self.counts[0])

    def mean_of_sequences(self, x: Tensor) -> Tensor:
        """Computes the mean of ``[sequences]`` numbers that every rank of the group holds.

        The first rank returns it and the other ranks return 0, so that a sum over ranks is right.
        """
        return _at(self.sample_mask, x).sum() / self.divisor(self.counts[1]) * is_first(self.group)

    def reduced(self, x: Tensor, where: Tensor, token_level: bool) -> Tensor:
        """Averages as the loss does: over tokens, or over each sequence and then over sequences."""
        if token_level:
            return self.mean(x, where)
        tokens_of_sequences = self.sums[2 if where is self.acting else 4].detach()
        of_own_sequence = self.divisor(tokens_of_sequences)[self.sequence]
        return (_at(where, x) / of_own_sequence).sum() / self.divisor(self.counts[1])


def _ratios(tokens: _Tokens, c: Tensor, o: ClippedPGConfig) -> tuple[Tensor, Tensor]:
    """Returns the ratios of the policy loss, unclamped and clamped."""
    if not o.has_ratio:
        return tokens.log_ratio, tokens.log_ratio
    if o.force_on_policy_ratio:
        ratio = bounded_exp(tokens.log_ratio)
        return ratio, ratio
    log_ratio = tokens.log_ratio
    if o.sequence_level_importance_ratios:
        log_ratio = (tokens.sums[0] / tokens.divisor(tokens.sums[2].detach()))[tokens.sequence]
    ratio = bounded_exp(log_ratio)
    return ratio, ratio.clamp(1 - o.ratio_clip_min, 1 + o.ratio_clip_max)


def _policy_loss(ratio: Tensor, clamped: Tensor, c: Tensor, advantages: Tensor, o: ClippedPGConfig) -> Tensor:
    if o.use_cispo:
        return -(advantages * clamped.detach()) * c
    loss = torch.maximum(-advantages * ratio, -advantages * clamped)
    if o.ratio_clip_c is not None:
        loss = torch.where(advantages < 0, loss.minimum(-advantages * o.ratio_clip_c), loss)
    return loss


def _weights(tokens: _Tokens, o: ClippedPGConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the importance weight of each token in the policy loss, and its metrics.

    Weights have no gradient.
    """
    gspo, kind = o.sequence_level_importance_ratios, o.truncated_importance_sampling_type
    low, high = o.truncated_importance_sampling_ratio_min or 0.0, o.truncated_importance_sampling_ratio or torch.inf
    weight = _finite_exp(tokens.sums[1].detach() if gspo else tokens.log_weight)
    outside = (weight < low) | (weight > high)
    metrics: dict[str, Tensor] = {}
    if kind == "tis":
        weight = weight.clamp(low, high)
    elif kind == "icepop":
        weight = weight.masked_fill(outside, 0.0)
    elif kind == "seq-mask-tis":
        geometric_mean = (tokens.sums[1] / tokens.divisor(tokens.sums[3])).detach().exp()
        outside = (geometric_mean < low) | (geometric_mean > high)
        weight = weight.masked_fill(outside[tokens.sequence], 0.0)
        metrics["is_oob_ratio"] = tokens.mean_of_sequences(outside.to(weight.dtype))
    if kind in ("tis", "icepop"):
        metrics["is_oob_ratio"] = tokens.mean(
            (outside[tokens.sequence] if gspo else outside).to(weight.dtype), tokens.scored
        )
    metrics["sampling_importance_ratio"] = (
        tokens.mean_of_sequences(weight) if gspo else tokens.mean(weight, tokens.scored)
    )
    if not o.use_importance_sampling_correction:
        return torch.ones_like(tokens.log_weight), metrics
    return _at(tokens.scored, weight[tokens.sequence] if gspo else weight), metrics


def _positive_nll(c: Tensor, positive: Tensor, tokens: _Tokens, count: Tensor | None) -> Tensor:
    """Computes this rank's part of the mean NLL of tokens in sequences with a reward above 0.

    ``positive`` is ``[sequences]`` bool. If ``count`` is None, the sum is divided by the number of
    these tokens.
    """
    if count is None:
        count = _at(positive, tokens.sums[2].detach()).sum()
    return -tokens.total(c, tokens.acting & positive[tokens.sequence]) / tokens.divisor(count)


def _kl_penalty(u: Tensor, q: Tensor, g: Tensor, o: ClippedPGConfig) -> Tensor:
    d, bound = q - u, o.kl_input_clamp_value
    weight = _finite_exp(u - (g if o.use_on_policy_kl_approximation else u.detach()))
    if bound is not None:
        # Beyond the clamp a token has no gradient, not even through its weight (as in NeMo-RL).
        weight = torch.where(d.abs() > bound, weight.detach(), weight)
        d = d.clamp(-bound, bound)
    estimate = weight * _kl_estimate(d, o)
    if o.kl_output_clamp_value is None:
        return estimate
    return estimate.clamp(-o.kl_output_clamp_value, o.kl_output_clamp_value)


def _kl_estimate(d: Tensor, o: ClippedPGConfig) -> Tensor:
    """Estimates the KL divergence (Schulman 2020, "Approximating KL divergence").

    d is the log-probability of the reference minus that of the policy.
    """
    match o.reference_policy_kl_type:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return d.expm1() - d


def _finite_exp(x: Tensor) -> Tensor:
    """Computes ``exp(x)``, or 0 without a gradient where ``exp(x)`` overflows.

    A mask after ``exp`` would multiply an infinite gradient by 0, which is NaN.
    """
    return x.masked_fill(~x.detach().exp().isfinite(), -torch.inf).exp()


def _range(name: str, x: Tensor, tokens: _Tokens) -> dict[str, Tensor]:
    """Returns the mean, the minimum and the maximum of x over acting tokens, as metrics."""
    infinity = x.new_full((1,), torch.inf)
    low, high = (
        torch.cat([sign * infinity, torch.where(tokens.acting, x.detach(), sign * infinity)]) for sign in (1, -1)
    )
    return {name: tokens.mean(x, tokens.acting), f"{name}_min": low.amin(), f"{name}_max": high.amax()}


def _distances(c: Tensor, p: Tensor, generation: Tensor, tokens: _Tokens, o: ClippedPGConfig) -> dict[str, Tensor]:
    """Returns metrics of the distances between the generating, previous and current policies."""
    g = _at(tokens.scored, generation)
    mixture = torch.logaddexp(p, g) - log(2)
    to_p, to_g = ((mixture - x).expm1() - (mixture - x) for x in (p, g))
    metrics = {
        "token_mult_prob_error": (g - p).abs().exp(),
        "gen_kl_error": _kl_estimate(p - g, o),
        "policy_kl_error": _kl_estimate(g - p, o),
        "js_divergence_error": (to_p + to_g) / 2,
    }
    surprise = (c - _at(tokens.acting, generation)).exp() * -c
    return {
        "approx_entropy": tokens.mean(surprise, tokens.acting),
        **{name: tokens.mean(x, tokens.scored) for name, x in metrics.items()},
    }


def _check(
    o: Any,
    prev: Tensor | None,
    reference: Tensor | None,
    rewards: Tensor | None,
    positive_tokens: Tensor | float | None,
) -> None:
    if not isinstance(o, ClippedPGConfig):
        raise ValueError(f"config {o!r}: expected ClippedPGConfig(...)")
    if prev is None and not o.force_on_policy_ratio:
        raise ValueError(
            "prev_logprobs is missing: expected [T], of the policy before the update; or set force_on_policy_ratio, "
            "which takes logprobs for them"
        )
    if o.has_kl and reference is None:
        raise ValueError(
            "reference_logprobs is missing: expected [T] with reference_policy_kl_penalty "
            f"{o.reference_policy_kl_penalty}; or set that to 0"
        )
    needed: dict[str, Any] = {"rewards": rewards}
    if o.counts_positive:
        needed["positive_tokens"] = positive_tokens
    missing = [name for name, x in needed.items() if x is None]
    if o.positive_example_nll_weight and missing:
        raise ValueError(
            f"{' and '.join(missing)}: missing with positive_example_nll_weight {o.positive_example_nll_weight}; "
            "pass [S] rewards and the number of tokens in sequences with a reward above 0, or set that to 0"
        )


def _check_rewards(rewards: Any, sample_mask: Tensor) -> None:
    if rewards is None:
        return
    if not isinstance(rewards, Tensor) or rewards.shape != sample_mask.shape:
        raise ValueError(
            f"rewards {list(rewards.shape) if isinstance(rewards, Tensor) else rewards!r}: "
            f"expected {list(sample_mask.shape)}, one for each sequence, as sample_mask"
        )
    check_device("rewards", rewards, sample_mask, "sample_mask")
