# SPDX-License-Identifier: Apache-2.0
"""The clipped policy gradient on log-probabilities of single tokens: PPO, GRPO, DAPO, REINFORCE, GSPO, CISPO.

Options are those of NeMo-RL's ``ClippedPGLossConfig``, by the same names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.numerics import bounded_exp, check_tokens
from fused_losses.ranks import is_first, sum_over_for_parts


@dataclass(frozen=True, kw_only=True)
class ClippedPGConfig:
    """With c the log-probability of a token, p that before the update, g that when it was generated, q the reference's, A the advantage.

    Raises ``ValueError`` for options that contradict each other.
    """

    disable_ppo_ratio: bool = False
    """REINFORCE: c in the place of the ratio, no clip. ``force_on_policy_ratio`` goes before it."""
    token_level_loss: bool = True
    """Mean over tokens, or over sequences of their means over tokens."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv:2507.18071): a sequence's ratio is exp of its mean c - p, its importance weight exp of its sum of p - g. Where there
    is no ratio, or it is 1 (the options above and ``force_on_policy_ratio``), the weight alone."""
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    """The ratio is clamped to ``[1 - ratio_clip_min, 1 + ratio_clip_max]``."""
    ratio_clip_c: float | None = None
    """Dual clip (arXiv:1912.09729): where A < 0 the loss is at most -A times this, which is above 1."""
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: float | None = 20.0
    """Bounds q - c, in nats."""
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    """The penalty is in the rewards, and none in the loss."""
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    """Bounds of the importance weights: clamped to them (tis), zero outside (icepop), or a sequence's weights zero where their
    geometric mean is outside (seq-mask-tis)."""
    use_on_policy_kl_approximation: bool = False
    """The KL estimate has the weight exp(c - g), in place of exp(c - c), whose gradient is that of the score."""
    force_on_policy_ratio: bool = False
    """p is c, without its gradient; no clip."""
    use_cispo: bool = False
    """CISPO (arXiv:2506.13585), clamped on both sides."""
    positive_example_nll_weight: float = 0.0
    """Of the NLL of sequences with a reward above 0 (VAPO, arXiv:2504.05118)."""
    epsilon: float = 0.0
    """Added to what divides; 1e-8 in NeMo-RL. Without it, a mean over nothing is 0."""

    @property
    def has_ratio(self) -> bool:
        return self.force_on_policy_ratio or not self.disable_ppo_ratio

    @property
    def of_sequences(self) -> bool:
        """Whether anything is needed of whole sequences."""
        return (
            not self.token_level_loss
            or self.sequence_level_importance_ratios
            or self.truncated_importance_sampling_type == "seq-mask-tis"
        )

    def __post_init__(self) -> None:
        for wrong, message in _mistakes(self):
            if wrong:
                raise ValueError(message)


def _mistakes(c: ClippedPGConfig) -> Iterator[tuple[bool, str]]:
    gspo, kind = c.sequence_level_importance_ratios, c.truncated_importance_sampling_type
    low, high = c.truncated_importance_sampling_ratio_min, c.truncated_importance_sampling_ratio
    numbers = {"ratio_clip_min": c.ratio_clip_min, "ratio_clip_max": c.ratio_clip_max, "epsilon": c.epsilon}
    numbers["positive_example_nll_weight"] = c.positive_example_nll_weight
    for name, number in numbers.items():
        yield not number >= 0, f"{name} {number}: expected 0 or more"
    for name, clamp in {
        "kl_input_clamp_value": c.kl_input_clamp_value,
        "kl_output_clamp_value": c.kl_output_clamp_value,
    }.items():
        yield clamp is not None and not clamp > 0, f"{name} {clamp}: expected a positive number, or None for no bound"
    yield (
        c.reference_policy_kl_type not in ("k1", "k2", "k3"),
        f"reference_policy_kl_type {c.reference_policy_kl_type!r}: expected 'k1', 'k2' or 'k3'",
    )
    yield (
        c.ratio_clip_c is not None and not c.ratio_clip_c > 1,
        f"ratio_clip_c {c.ratio_clip_c}: expected more than 1, or None for no dual clip",
    )
    yield gspo and c.token_level_loss, "token_level_loss True: expected False with sequence_level_importance_ratios"
    for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios", "ratio_clip_c"):
        yield (
            c.use_cispo and bool(getattr(c, name)),
            f"use_cispo with {name}: CISPO has a detached clamped ratio of each token; leave {name} out",
        )
    yield c.use_cispo and not c.token_level_loss, "use_cispo with token_level_loss False: expected True"
    if kind is None:
        yield (
            low is not None or high is not None,
            f"truncated_importance_sampling_ratio {high}, _min {low}: name the type that they bound",
        )
        return
    expected = "'tis', 'icepop', 'seq-mask-tis' or None"
    yield (
        kind not in ("tis", "icepop", "seq-mask-tis"),
        f"truncated_importance_sampling_type {kind!r}: expected {expected}",
    )
    yield (
        not c.use_importance_sampling_correction,
        "use_importance_sampling_correction False: expected True with a truncation",
    )
    yield (
        high is None or not high > 0,
        f"truncated_importance_sampling_ratio {high}: expected a positive number with type {kind!r}",
    )
    yield (
        low is None and kind != "tis",
        f"truncated_importance_sampling_ratio_min None: expected a number with type {kind!r}",
    )
    yield (
        low is not None and high is not None and low > high,
        f"truncated_importance_sampling_ratio_min {low}: expected at most {high}, the upper bound",
    )
    yield (
        kind == "seq-mask-tis" and gspo,
        "truncated_importance_sampling_type 'seq-mask-tis': not with sequence_level_importance_ratios",
    )


def clipped_pg_loss(
    logprobs: Tensor,
    *,
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence: Tensor,
    sample_mask: Tensor,
    valid_tokens: Tensor | int,
    valid_sequences: Tensor | int,
    config: ClippedPGConfig,
    reference_logprobs: Tensor | None = None,
    unfiltered_logprobs: Tensor | None = None,
    rewards: Tensor | None = None,
    positive_tokens: Tensor | int | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its metrics, for a pack of sequences whose tokens may be split over ``cp_group``.

    logprobs: ``[T]``, of the labels of this rank's tokens, from ``linear_logprobs``; gradients flow. prev_logprobs, generation_logprobs,
    reference_logprobs (needed with a KL penalty), advantages: ``[T]``. mask: ``[T]`` bool, the tokens that count; sequence: ``[T]``
    integers; sample_mask: ``[S]`` bool, the sequences that count; whatever is at other tokens has no effect. A token that top-k/p filtering
    leaves out, of log-probability -inf, has no part in the policy loss; ``unfiltered_logprobs`` are those without filtering, for the KL.
    valid_tokens, valid_sequences: the numbers of those that count in the whole batch, over every rank and microbatch. rewards ``[S]`` and
    positive_tokens, those that count in sequences with a reward above 0, in the whole batch: needed with ``positive_example_nll_weight``.

    Loss, gradients and metrics are this rank's parts, and add up over dp, cp and microbatches, but for the metrics ``.._min`` and
    ``.._max``, infinite without tokens, to be reduced so. Metrics, without gradients: ``kl_penalty`` (reduced like the loss),
    ``probs_ratio{,_clamped}{,_min,_max}``, ``approx_entropy``, ``token_mult_prob_error``, ``gen_kl_error``, ``policy_kl_error``,
    ``js_divergence_error``, ``sampling_importance_ratio``, ``is_oob_ratio`` (with a truncation), ``positive_nll_loss``, ``num_valid_samples``.

    Collectives on ``cp_group``: none for token-level options; else one all-reduce of 5 S numbers, and for GSPO one in backward.

    Raises ``ValueError`` for what is missing or does not fit.
    """
    policies = {
        "prev_logprobs": prev_logprobs,
        "generation_logprobs": generation_logprobs,
        "reference_logprobs": reference_logprobs,
    }
    check_tokens(
        logprobs,
        **policies,
        unfiltered_logprobs=unfiltered_logprobs,
        advantages=advantages,
        mask=mask,
        sequence=sequence,
    )
    _check(sample_mask, config, reference_logprobs, rewards, positive_tokens)
    o, c = config, logprobs
    prev_logprobs, generation_logprobs, advantages = (
        x.to(c.dtype) for x in (prev_logprobs, generation_logprobs, advantages)
    )
    p = c.detach() if o.force_on_policy_ratio else prev_logprobs
    counted = mask & sample_mask[sequence]
    scored = counted & (p != -torch.inf)
    acting = (scored if o.has_ratio else counted) & (c != -torch.inf)
    u = c if unfiltered_logprobs is None else unfiltered_logprobs
    penalised = counted & (u != -torch.inf)
    log_ratio = _at(acting, c) - _at(acting, p) if o.has_ratio else _at(acting, c)
    log_weight = (_at(scored, p) - _at(scored, generation_logprobs)).detach()
    per_token = torch.stack([log_ratio, log_weight, *(where.to(c.dtype) for where in (acting, scored, penalised))])
    sums = c.new_zeros(5, len(sample_mask)).index_add(1, sequence, per_token)
    tokens = _Tokens(
        log_ratio=log_ratio,
        log_weight=log_weight,
        acting=acting,
        scored=scored,
        penalised=penalised,
        sums=sum_over_for_parts(cp_group, sums) if o.of_sequences else sums,
        sequence=sequence,
        sample_mask=sample_mask,
        counts=(_count(valid_tokens, c), _count(valid_sequences, c)),
        epsilon=o.epsilon,
        group=cp_group,
    )
    ratio, clamped = _ratios(tokens, c, o)
    weight, weight_metrics = _weights(tokens, o)
    policy = tokens.reduced(
        weight * _policy_loss(ratio, clamped, _at(acting, c), _at(acting, advantages), o), acting, o.token_level_loss
    )
    loss, kl, nll = policy, torch.zeros_like(policy), torch.zeros_like(policy)
    if _has_kl(o) and reference_logprobs is not None:
        q, g = (_at(tokens.penalised, x) for x in (reference_logprobs, generation_logprobs))
        estimates = _kl_penalty(_at(tokens.penalised, u), q, g, o)
        kl = tokens.reduced(estimates, tokens.penalised, o.token_level_loss)
        loss = loss + o.reference_policy_kl_penalty * kl
    if o.positive_example_nll_weight and rewards is not None and positive_tokens is not None:
        nll = -tokens.total(_at(acting, c), acting & (rewards > 0)[sequence]) / tokens.divisor(
            _count(positive_tokens, c)
        )
        loss = loss + o.positive_example_nll_weight * nll
    metrics = {
        "kl_penalty": kl,
        "positive_nll_loss": nll,
        "num_valid_samples": sample_mask.sum().to(c.dtype) * is_first(cp_group),
    }
    metrics |= _range("probs_ratio", ratio, tokens) | _range("probs_ratio_clamped", clamped, tokens) | weight_metrics
    metrics |= _distances(_at(acting, c), _at(scored, p), generation_logprobs, tokens, o)
    return loss, {name: value.detach() for name, value in metrics.items()}


def _at(where: Tensor, x: Tensor) -> Tensor:
    """0 elsewhere: never times 0, which NaN survives."""
    return torch.where(where, x, 0.0)


def _count(count: Tensor | int, like: Tensor) -> Tensor:
    return torch.as_tensor(count, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class _Tokens:
    """This rank's tokens, ``[T]`` each, and how means over them, and over the sequences that they belong to, are taken."""

    log_ratio: Tensor
    """c - p of those acting; c where there is no ratio."""
    log_weight: Tensor
    """p - g of those scored."""
    acting: Tensor
    """With a part in the policy loss."""
    scored: Tensor
    penalised: Tensor
    """With a part in the KL penalty."""
    sums: Tensor
    """Of those five over each sequence, ``[5, S]``; over all of its tokens, on whichever rank, where an option needs that."""
    sequence: Tensor
    sample_mask: Tensor
    counts: tuple[Tensor, Tensor]
    epsilon: float
    group: dist.ProcessGroup | None

    def divisor(self, count: Tensor) -> Tensor:
        return count + self.epsilon if self.epsilon else torch.where(count == 0, 1.0, count)

    def total(self, x: Tensor, where: Tensor) -> Tensor:
        return _at(where, x).sum()

    def mean(self, x: Tensor, where: Tensor) -> Tensor:
        """This rank's part of the mean over all tokens that count."""
        return self.total(x, where) / self.divisor(self.counts[0])

    def mean_of_sequences(self, x: Tensor) -> Tensor:
        """Of ``[S]`` numbers, which every rank of the group knows: the first one tells."""
        return _at(self.sample_mask, x).sum() / self.divisor(self.counts[1]) * is_first(self.group)

    def reduced(self, x: Tensor, where: Tensor, token_level: bool) -> Tensor:
        """As the loss is."""
        if token_level:
            return self.mean(x, where)
        row = 2 if where is self.acting else 4
        return (_at(where, x) / self.divisor(self.sums[row].detach())[self.sequence]).sum() / self.divisor(
            self.counts[1]
        )


def _ratios(tokens: _Tokens, c: Tensor, o: ClippedPGConfig) -> tuple[Tensor, Tensor]:
    """And clamped."""
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
    """Of each token in the policy loss; constants."""
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


def _has_kl(o: ClippedPGConfig) -> bool:
    return o.reference_policy_kl_penalty != 0 and not o.use_kl_in_reward


def _kl_penalty(u: Tensor, q: Tensor, g: Tensor, o: ClippedPGConfig) -> Tensor:
    d, bound = q - u, o.kl_input_clamp_value
    weight = _finite_exp(u - (g if o.use_on_policy_kl_approximation else u.detach()))
    if bound is not None:
        weight = torch.where(
            d.abs() > bound, weight.detach(), weight
        )  # beyond the clamp a token has no gradient at all
        d = d.clamp(-bound, bound)
    estimate = weight * _kl_estimate(d, o)
    return (
        estimate
        if o.kl_output_clamp_value is None
        else estimate.clamp(-o.kl_output_clamp_value, o.kl_output_clamp_value)
    )


def _kl_estimate(d: Tensor, o: ClippedPGConfig) -> Tensor:
    """d: log-probability of the reference less that of the policy (Schulman 2020, "Approximating KL divergence")."""
    match o.reference_policy_kl_type:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return d.expm1() - d


def _finite_exp(x: Tensor) -> Tensor:
    """0 where it overflows, and there without a gradient, which would be 0 times infinity."""
    return x.masked_fill(~x.detach().exp().isfinite(), -torch.inf).exp()


def _range(name: str, x: Tensor, tokens: _Tokens) -> dict[str, Tensor]:
    infinity = x.new_full((1,), torch.inf)
    low, high = (
        torch.cat([sign * infinity, torch.where(tokens.acting, x.detach(), sign * infinity)]) for sign in (1, -1)
    )
    return {name: tokens.mean(x, tokens.acting), f"{name}_min": low.amin(), f"{name}_max": high.amax()}


def _distances(c: Tensor, p: Tensor, generation: Tensor, tokens: _Tokens, o: ClippedPGConfig) -> dict[str, Tensor]:
    """Between the policies that generate, were, and are."""
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
    sample_mask: Tensor,
    o: ClippedPGConfig,
    reference: Tensor | None,
    rewards: Tensor | None,
    positive_tokens: Tensor | int | None,
) -> None:
    if sample_mask.dim() != 1:
        raise ValueError(f"sample_mask {list(sample_mask.shape)}: expected [S], one for each sequence of the pack")
    if rewards is not None and rewards.shape != sample_mask.shape:
        raise ValueError(
            f"rewards {list(rewards.shape)}: expected {list(sample_mask.shape)}, one for each sequence, as sample_mask"
        )
    if _has_kl(o) and reference is None:
        raise ValueError(
            f"reference_logprobs is missing: expected [T] with reference_policy_kl_penalty {o.reference_policy_kl_penalty}; or set that to 0"
        )
    if o.positive_example_nll_weight and (rewards is None or positive_tokens is None):
        raise ValueError(
            "rewards or positive_tokens is missing: expected [S] and a number with positive_example_nll_weight; or set that to 0"
        )
