# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's clipped policy gradient (``ClippedPGLossFn``): PPO, GRPO, DAPO, REINFORCE, GSPO, CISPO, with a KL penalty.

Of each token: c its log-prob under the policy trained, p before the update, g when generated, q of the reference; u is c without top-k/p
filtering; A its advantage. sg stops the gradient. R is the mean over tokens, or the mean over sequences of their means over tokens.

    rho = exp(c - p)                                  GSPO: exp(mean_t(c - p)) of the sequence
                                                      force_on_policy_ratio: exp(c - sg(c))       disable_ppo_ratio: c
    l   = max(-A rho, -A clamp(rho))                  CISPO: -A sg(clamp(rho)) c                  dual clip: min(l, -A ratio_clip_c) where A < 0
    L   = R(w l) + beta R(kl(u, q)) + mu nll          w: importance.py, kl: kl.py
    nll = - sum of c over tokens of sequences with a reward above 0 / their number

Here the reference is right and the original is not: the normaliser of nll is global, where the original's is local, so that its parts do not
add up to the loss of the batch (``positive_nll_normaliser``). A token filtered out by top-k/p, of c or p = -inf, takes no part in what
is computed of c or p (nor in the mean over its sequence), where the original sets it to 0: a ratio of 1 and a loss of -A, and a
weight of 1/p_gen. The global normalisers are the caller's and count what the caller counts. Masked NaN is
selected away, where the original multiplies it by 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.importance import Truncation, TruncationType, exp_or_zero, importance_weights
from dense_losses.kl import KLType, js_estimate, kl_estimate
from dense_losses.reductions import largest, select, sequence_mean, smallest, token_mean

PositiveNLLNormaliser = Literal["global", "local"]


@dataclass(frozen=True, kw_only=True)
class ClippedPGOptions:
    """Names and defaults are those of NeMo-RL's ``ClippedPGLossConfig``; the last two are ours."""

    disable_ppo_ratio: bool = False
    """REINFORCE: the log-prob takes the place of the ratio, and there is no clip. Ignored under ``force_on_policy_ratio``."""
    token_level_loss: bool = True
    """Mean over tokens; if not, mean over sequences of their means over tokens."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio for a sequence, of the *mean* of c - p; and one importance weight, of the *sum* of p - g."""
    ratio_clip_min: float = 0.2
    """The ratio is clamped from below to 1 minus this."""
    ratio_clip_max: float = 0.2
    """The ratio is clamped from above to 1 plus this."""
    ratio_clip_c: float | None = None
    """Dual clip: the loss of a token of negative advantage is at most -A times this, which is above 1. None: no such bound."""
    reference_policy_kl_penalty: float = 0.01
    """beta, the weight of the KL penalty."""
    reference_policy_kl_type: KLType = "k3"
    """The KL estimator, of the penalty and of the metrics ``gen_kl_error`` and ``policy_kl_error``."""
    kl_input_clamp_value: float | None = 20.0
    """Bounds q - u to +- this many nats. None: no bound."""
    kl_output_clamp_value: float | None = 10.0
    """Bounds the estimate, times its weight, to +- this many nats. None: no bound."""
    use_kl_in_reward: bool = False
    """The penalty is in the reward, so beta is 0 here."""
    use_importance_sampling_correction: bool = False
    """Weights the policy loss by w; if not, w is only a metric."""
    truncated_importance_sampling_type: TruncationType | None = None
    """How w is bounded. None: not at all."""
    truncated_importance_sampling_ratio: float | None = None
    """The upper bound of w; for seq-mask-tis of the geometric mean of a sequence's."""
    truncated_importance_sampling_ratio_min: float | None = None
    """The lower bound. None: 0, for tis only."""
    use_on_policy_kl_approximation: bool = False
    """The KL estimate is weighted by exp(u - g), which corrects for g; if not, by exp(u - sg(u)) = 1, which only adds the score term."""
    force_on_policy_ratio: bool = False
    """p := sg(c) everywhere: the ratio is 1, its gradient that of c, and there is no clip."""
    use_cispo: bool = False
    """CISPO, with both sides clamped."""
    positive_example_nll_weight: float = 0.0
    """mu of VAPO, the weight of the mean NLL of tokens in sequences of positive reward."""
    positive_nll_normaliser: PositiveNLLNormaliser = "global"
    """Divides that NLL by ``positive_tokens``, or as the original by the number among the tokens given: then parts do not add up."""
    epsilon: float = 0.0
    """Added to every count that divides; 1e-8 in NeMo-RL's ``masked_mean``. 0: what has no counted token is 0."""

    @property
    def kl_penalty(self) -> float:
        """beta as it is in the loss."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def truncation(self) -> Truncation | None:
        if self.truncated_importance_sampling_type is None or self.truncated_importance_sampling_ratio is None:
            return None
        minimum = self.truncated_importance_sampling_ratio_min or 0.0
        return Truncation(
            type=self.truncated_importance_sampling_type,
            minimum=minimum,
            maximum=self.truncated_importance_sampling_ratio,
        )

    def __post_init__(self) -> None:
        for true, name, expected in _requirements(self):
            if not true:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")


def _requirements(o: ClippedPGOptions) -> Iterator[tuple[bool, str, str]]:
    """What must be true, else which option is wrong, and what was expected of it."""
    for name, choices in (
        ("reference_policy_kl_type", get_args(KLType)),
        ("truncated_importance_sampling_type", (None, *get_args(TruncationType))),
        ("positive_nll_normaliser", get_args(PositiveNLLNormaliser)),
    ):
        yield getattr(o, name) in choices, name, f"one of {choices}"
    for name in ("ratio_clip_min", "ratio_clip_max", "positive_example_nll_weight", "epsilon"):
        yield getattr(o, name) >= 0, name, "0 or more"
    for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
        yield getattr(o, name) is None or getattr(o, name) > 0, name, "None or more than 0"
    yield o.ratio_clip_c is None or o.ratio_clip_c > 1, "ratio_clip_c", "None or more than 1"
    if o.sequence_level_importance_ratios:
        yield not o.token_level_loss, "token_level_loss", "False with sequence_level_importance_ratios=True"
    if o.use_cispo:
        for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
            yield not getattr(o, name), name, "False with use_cispo=True"
        yield o.ratio_clip_c is None, "ratio_clip_c", "None with use_cispo=True"
        yield o.token_level_loss, "token_level_loss", "True with use_cispo=True"
    yield from _truncation_requirements(o)


def _truncation_requirements(o: ClippedPGOptions) -> Iterator[tuple[bool, str, str]]:
    kind, low, high = (
        o.truncated_importance_sampling_type,
        o.truncated_importance_sampling_ratio_min,
        o.truncated_importance_sampling_ratio,
    )
    given = f"with truncated_importance_sampling_type={kind!r}"
    if kind is None:
        yield high is None, "truncated_importance_sampling_ratio", f"None {given}"
        yield low is None, "truncated_importance_sampling_ratio_min", f"None {given}"
        return
    yield o.use_importance_sampling_correction, "use_importance_sampling_correction", f"True {given}"
    yield high is not None and high > 0, "truncated_importance_sampling_ratio", f"more than 0 {given}"
    yield low is not None or kind == "tis", "truncated_importance_sampling_ratio_min", f"a number {given}"
    yield (
        low is None or low <= (high or 0),
        "truncated_importance_sampling_ratio_min",
        f"at most truncated_importance_sampling_ratio={high}",
    )
    yield (
        kind != "seq-mask-tis" or not o.sequence_level_importance_ratios,
        "sequence_level_importance_ratios",
        f"False {given}",
    )


@dataclass(frozen=True, kw_only=True)
class _Means:
    """The means of this family: sums over the tokens given, divided by counts of the whole batch."""

    sequence: Tensor
    sample_mask: Tensor
    valid_tokens: Tensor
    valid_sequences: Tensor
    epsilon: float

    def of_tokens(self, x: Tensor, mask: Tensor) -> Tensor:
        return token_mean(x, mask, self.valid_tokens, self.epsilon)

    def of_sequences(self, x: Tensor) -> Tensor:
        return token_mean(x, self.sample_mask, self.valid_sequences, self.epsilon)

    def within_sequences(self, x: Tensor, mask: Tensor) -> Tensor:
        return sequence_mean(x, mask, self.sequence, self.sample_mask.shape[0], self.epsilon)

    def reduced(self, x: Tensor, mask: Tensor, token_level_loss: bool) -> Tensor:
        """R of the module's formula."""
        return self.of_tokens(x, mask) if token_level_loss else self.of_sequences(self.within_sequences(x, mask))


def clipped_pg(
    *,
    logprobs: Float[Tensor, " tokens"],
    prev_logprobs: Float[Tensor, " tokens"],
    generation_logprobs: Float[Tensor, " tokens"],
    reference_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sample_mask: Bool[Tensor, " sequences"],
    valid_tokens: Int[Tensor, ""],
    valid_sequences: Int[Tensor, ""],
    options: ClippedPGOptions,
    unfiltered_logprobs: Float[Tensor, " tokens"] | None = None,
    rewards: Float[Tensor, " sequences"] | None = None,
    positive_tokens: Int[Tensor, ""] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The loss and its metrics, for tokens of ``mask`` in sequences of ``sample_mask``.

    ``unfiltered_logprobs`` is u (None: c); ``rewards`` and ``positive_tokens``, the number of trained tokens in sequences of positive reward
    over the whole batch, are needed where ``positive_example_nll_weight`` is above 0. Gradients flow through c and u.

    Metrics, which carry no gradient; all but the extrema add up over ranks and microbatches to those of the whole batch:
    - like the loss: ``loss``, and ``kl_penalty``, R(kl) without beta;
    - means over tokens: ``probs_ratio``, ``probs_ratio_clamped`` (of c if ``disable_ppo_ratio``), ``approx_entropy`` -exp(c - g) c,
      ``token_mult_prob_error`` exp|g - p|, ``gen_kl_error`` KL(g || p), ``policy_kl_error`` KL(p || g), ``js_divergence_error``;
    - means over tokens, but over sequences for GSPO: ``sampling_importance_ratio``, w after truncation;
    - means over tokens, but over sequences for seq-mask-tis, and only if truncated: ``is_oob_ratio``, the share of w out of bounds;
    - sums: ``num_valid_samples``, and ``positive_nll_loss``, nll without mu (a mean of the part, which does not add up, if "local").
    Extrema over tokens: ``probs_ratio_min``, ``probs_ratio_clamped_min``, inf if there is no token, to be reduced by min;
    ``probs_ratio_max``, ``probs_ratio_clamped_max``, -inf if there is none, to be reduced by max.
    """
    o = options
    c, p = logprobs, logprobs.detach() if o.force_on_policy_ratio else prev_logprobs
    trained = mask & sample_mask[sequence]
    scored = trained & ~p.isneginf()
    actor = (trained if o.disable_ppo_ratio else scored) & ~c.isneginf()
    dtype = c.dtype  # of the counts as well: an int64 plus epsilon would be a float32
    means = _Means(
        sequence=sequence,
        sample_mask=sample_mask,
        valid_tokens=valid_tokens.to(dtype),
        valid_sequences=valid_sequences.to(dtype),
        epsilon=o.epsilon,
    )
    ratio, clamped = _ratios(c, p, actor, means, o)
    weights, weight_metrics = _policy_weights(p, generation_logprobs, scored, means, o)
    policy = means.reduced(
        weights * _surrogate(ratio, clamped, select(actor, c), select(actor, advantages), o), actor, o.token_level_loss
    )
    kl = _kl(
        c if unfiltered_logprobs is None else unfiltered_logprobs,
        reference_logprobs,
        generation_logprobs,
        trained,
        means,
        o,
    )
    nll = _positive_nll(c, actor, rewards, positive_tokens, means, o)
    loss = policy + o.kl_penalty * kl + o.positive_example_nll_weight * nll
    metrics = {
        "loss": loss,
        "kl_penalty": kl,
        "positive_nll_loss": nll,
        "num_valid_samples": sample_mask.sum().to(dtype),
        "approx_entropy": -means.of_tokens((c - generation_logprobs).exp() * c, actor),
        **_ratio_metrics("probs_ratio", ratio, actor, means),
        **_ratio_metrics("probs_ratio_clamped", clamped, actor, means),
        **_mismatch_metrics(p, generation_logprobs, scored, means, o.reference_policy_kl_type),
        **weight_metrics,
    }
    return loss, {name: value.detach() for name, value in metrics.items()}


def _ratios(c: Tensor, p: Tensor, actor: Tensor, means: _Means, o: ClippedPGOptions) -> tuple[Tensor, Tensor]:
    """rho and clamp(rho); the same twice where there is no clip."""
    if o.disable_ppo_ratio and not o.force_on_policy_ratio:
        ratio = select(actor, c)
        return ratio, ratio
    log_ratio = select(actor, c - p)
    if o.sequence_level_importance_ratios and not o.force_on_policy_ratio:
        log_ratio = means.within_sequences(log_ratio, actor)[means.sequence]
    ratio = log_ratio.exp()
    return ratio, ratio if o.force_on_policy_ratio else ratio.clamp(1 - o.ratio_clip_min, 1 + o.ratio_clip_max)


def _surrogate(ratio: Tensor, clamped: Tensor, c: Tensor, advantages: Tensor, o: ClippedPGOptions) -> Tensor:
    """l."""
    if o.use_cispo:
        return -advantages * clamped.detach() * c
    pessimistic = torch.maximum(-advantages * ratio, -advantages * clamped)
    if o.ratio_clip_c is None:
        return pessimistic
    return torch.where(advantages < 0, torch.minimum(pessimistic, -advantages * o.ratio_clip_c), pessimistic)


def _policy_weights(
    p: Tensor, g: Tensor, scored: Tensor, means: _Means, o: ClippedPGOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """w of every token as it is in the loss, and what is told of it."""
    of_sequences = o.sequence_level_importance_ratios
    sequences = means.sample_mask.shape[0]
    w, outside = importance_weights(
        p - g, scored, means.sequence, sequences, of_sequences=of_sequences, truncation=o.truncation, epsilon=o.epsilon
    )
    metrics = {"sampling_importance_ratio": means.of_sequences(w) if of_sequences else means.of_tokens(w, scored)}
    if o.truncated_importance_sampling_type == "seq-mask-tis":
        metrics["is_oob_ratio"] = means.of_sequences(outside.to(w.dtype))
    elif o.truncated_importance_sampling_type is not None:
        metrics["is_oob_ratio"] = means.of_tokens(
            (outside[means.sequence] if of_sequences else outside).to(w.dtype), scored
        )
    if not o.use_importance_sampling_correction:
        return torch.ones_like(p), metrics
    return select(scored, w[means.sequence] if of_sequences else w), metrics


def _kl(u: Tensor, q: Tensor, g: Tensor, trained: Tensor, means: _Means, o: ClippedPGOptions) -> Tensor:
    """R(kl(u, q)), 0 where it has no part in the loss."""
    if o.kl_penalty == 0:
        return u.new_zeros(())
    kept = trained & ~u.isneginf()
    u, q, g = (select(kept, x) for x in (u, q, g))
    estimates = kl_estimate(
        logprobs=u,
        reference_logprobs=q,
        kl_type=o.reference_policy_kl_type,
        weights=exp_or_zero(u - (g if o.use_on_policy_kl_approximation else u.detach())),
        input_clamp_value=o.kl_input_clamp_value,
        output_clamp_value=o.kl_output_clamp_value,
    )
    return means.reduced(estimates, kept, o.token_level_loss)


def _positive_nll(
    c: Tensor, actor: Tensor, rewards: Tensor | None, positive_tokens: Tensor | None, means: _Means, o: ClippedPGOptions
) -> Tensor:
    """The mean NLL of tokens in sequences of positive reward, 0 where it has no part in the loss."""
    if o.positive_example_nll_weight == 0:
        return c.new_zeros(())
    if rewards is None:
        raise ValueError(
            f"rewards=None: expected a tensor with positive_example_nll_weight={o.positive_example_nll_weight}"
        )
    positive = actor & (rewards > 0)[means.sequence]
    count = positive.sum() if o.positive_nll_normaliser == "local" else positive_tokens
    if count is None:
        raise ValueError("positive_tokens=None: expected a count with positive_nll_normaliser='global'")
    return token_mean(-c, positive, count.to(c.dtype), o.epsilon)


def _ratio_metrics(name: str, x: Tensor, actor: Tensor, means: _Means) -> dict[str, Tensor]:
    return {name: means.of_tokens(x, actor), f"{name}_min": smallest(x, actor), f"{name}_max": largest(x, actor)}


def _mismatch_metrics(p: Tensor, g: Tensor, scored: Tensor, means: _Means, kl_type: KLType) -> dict[str, Tensor]:
    """How far the policy before the update is from the one that generated: the exponential of their distance, and KL and JS divergences."""
    errors = {
        "token_mult_prob_error": (g - p).abs().exp(),
        "gen_kl_error": kl_estimate(logprobs=g, reference_logprobs=p, kl_type=kl_type),
        "policy_kl_error": kl_estimate(logprobs=p, reference_logprobs=g, kl_type=kl_type),
        "js_divergence_error": js_estimate(p, g),
    }
    return {name: means.of_tokens(error, scored) for name, error in errors.items()}
