# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's clipped policy gradient (``ClippedPGLossFn``), with a KL penalty.

PPO, GRPO, DAPO, REINFORCE, GSPO and CISPO are settings of it.

Symbols: c is the log-prob of a token under the policy being trained, p under the policy before the
update, g under the policy that generated it, q under the reference policy. u is c without top-k/p
filtering, A the advantage. sg stops the gradient. R is the mean over tokens, or the mean over
sequences of each sequence's mean over its tokens.

    rho = exp(c - p)                           PPO
          exp(mean_t(c - p))                   GSPO, of the sequence
          exp(c - sg(c))                       force_on_policy_ratio
          c                                    disable_ppo_ratio (REINFORCE)
    l   = max(-A rho, -A clamp(rho))           clamp to [1 - ratio_clip_min, 1 + ratio_clip_max]
          min(l, -A ratio_clip_c)              dual clip, where A < 0
          -A sg(clamp(rho)) c                  CISPO, in place of the maximum
    nll = - sum of c over tokens of sequences with a reward above 0 / their number
    L   = R(w l) + beta R(kl(u, q)) + mu nll   w: importance.py, kl: kl.py

The caller computes the global counts that divide, and decides what they count. We differ from
NeMo-RL in three points:

- It divides nll by a local count, so that the losses of parts do not add up to that of the batch.
  Here the count is global, unless ``positive_nll_normaliser`` says otherwise.
- It sets the log-prob of a token that top-k/p filtered out (c or p is -inf) to 0, which gives a
  ratio of 1, a loss of -A and a weight of 1/p_gen. Here such a token takes no part in what is
  computed from c or p, nor in the mean over its sequence.
- It multiplies masked values by 0, so that a NaN among them spoils the batch. Here they are
  selected away.

Sources: NeMo-RL ``ClippedPGLossFn``; PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7), GRPO
(Shao et al. 2024, arXiv 2402.03300), REINFORCE (as in arXiv 2402.14740), DAPO's two clip bounds
(arXiv 2503.14476), GSPO (arXiv 2507.18071), CISPO (MiniMax-M1, arXiv 2506.13585), the dual clip (Ye
et al. 2020, arXiv 1912.09729), VAPO's nll (arXiv 2504.05118, eq. 10).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.importance import exp_or_zero, importance_weights
from dense_losses.kl import KLType, js_estimate, kl_estimate
from dense_losses.reductions import largest, select, sequence_mean, smallest, token_mean


@dataclass(frozen=True, kw_only=True)
class _Means:
    """The means of this loss: sums over the given tokens, divided by counts of the whole batch."""

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
        """Computes R of the formula of this module."""
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
    options: Any,
    unfiltered_logprobs: Float[Tensor, " tokens"] | None = None,
    rewards: Float[Tensor, " sequences"] | None = None,
    positive_tokens: Int[Tensor, ""] | None = None,
    with_metrics: bool = True,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Computes the clipped policy-gradient loss and its metrics.

    A token is trained if it is in ``mask`` and its sequence is in ``sample_mask``.

    Args:
        logprobs: c ``[tokens]``, in nats. The loss is differentiable in it.
        prev_logprobs: p ``[tokens]``, in nats.
        generation_logprobs: g ``[tokens]``, in nats.
        reference_logprobs: q ``[tokens]``, in nats.
        advantages: A ``[tokens]``.
        mask: ``[tokens]``, the token mask alone, without ``sample_mask``.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sample_mask: ``[sequences]``.
        valid_tokens: The number of trained tokens of the whole batch.
        valid_sequences: The number of sequences in ``sample_mask`` of the whole batch.
        options: The options of ``lossgate.options.ClippedPgOptions``, as attributes.
        unfiltered_logprobs: u ``[tokens]``, in nats; None for c. The loss is differentiable in it.
        rewards: ``[sequences]``, needed if ``positive_example_nll_weight`` is above 0.
        positive_tokens: The number of trained tokens in sequences with a positive reward, of the
            whole batch. It is needed if ``positive_example_nll_weight`` is above 0 and
            ``positive_nll_normaliser`` is ``"global"``.
        with_metrics: Whether to compute the metrics, which take longer than the loss. If not, the
            dictionary is empty.

    Returns:
        The loss and the metrics, which carry no gradient. All metrics but the extrema add up, over
        ranks and microbatches, to those of the whole batch:

        - ``loss``, and ``kl_penalty``, which is R(kl) without beta, or 0 if beta is 0;
        - means over tokens: ``probs_ratio`` and ``probs_ratio_clamped`` (of c if
          ``disable_ppo_ratio``), ``approx_entropy`` of -exp(c - g) c, ``token_mult_prob_error`` of
          exp|g - p|, ``gen_kl_error`` of KL(g || p), ``policy_kl_error`` of KL(p || g), and
          ``js_divergence_error``;
        - ``sampling_importance_ratio``, the mean of w after truncation, over tokens, or over
          sequences for GSPO;
        - ``is_oob_ratio``, only if w is truncated: the share of w out of bounds, over tokens, or
          over sequences for seq-mask-tis;
        - ``num_valid_samples``, the number of sequences in ``sample_mask``;
        - ``positive_nll_loss``, which is nll without mu. It does not add up if the normaliser is
          ``"local"``.

        Ranks take the minimum of ``probs_ratio_min`` and ``probs_ratio_clamped_min``, which are inf
        without a trained token, and the maximum of ``probs_ratio_max`` and
        ``probs_ratio_clamped_max``, which are -inf without one.

    Raises:
        ValueError: if ``rewards`` or ``positive_tokens`` is None, but needed.
    """
    o = options
    c, p = logprobs, logprobs.detach() if o.force_on_policy_ratio else prev_logprobs
    trained = mask & sample_mask[sequence]
    scored = trained & ~p.isneginf()
    actor = (trained if o.disable_ppo_ratio else scored) & ~c.isneginf()
    dtype = c.dtype  # the counts need it as well: an int64 plus epsilon would be a float32
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
    u = c if unfiltered_logprobs is None else unfiltered_logprobs
    kl = _kl(u, reference_logprobs, generation_logprobs, trained, means, o)
    nll = _positive_nll(c, actor, rewards, positive_tokens, means, o)
    loss = policy + o.kl_penalty * kl + o.positive_example_nll_weight * nll
    if not with_metrics:
        return loss, {}
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


def _ratios(c: Tensor, p: Tensor, actor: Tensor, means: _Means, o: Any) -> tuple[Tensor, Tensor]:
    """Computes rho and clamp(rho); they are the same if there is no clip."""
    if o.disable_ppo_ratio and not o.force_on_policy_ratio:
        ratio = select(actor, c)
        return ratio, ratio
    log_ratio = select(actor, c - p)
    if o.sequence_level_importance_ratios and not o.force_on_policy_ratio:
        log_ratio = means.within_sequences(log_ratio, actor)[means.sequence]
    ratio = log_ratio.exp()
    return ratio, ratio if o.force_on_policy_ratio else ratio.clamp(1 - o.ratio_clip_min, 1 + o.ratio_clip_max)


def _surrogate(ratio: Tensor, clamped: Tensor, c: Tensor, advantages: Tensor, o: Any) -> Tensor:
    """Computes l of the formula of this module."""
    if o.use_cispo:
        return -advantages * clamped.detach() * c
    pessimistic = torch.maximum(-advantages * ratio, -advantages * clamped)
    if o.ratio_clip_c is None:
        return pessimistic
    return torch.where(advantages < 0, torch.minimum(pessimistic, -advantages * o.ratio_clip_c), pessimistic)


def _policy_weights(p: Tensor, g: Tensor, scored: Tensor, means: _Means, o: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the weight of every token in the loss, and the metrics of w."""
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


def _kl(u: Tensor, q: Tensor, g: Tensor, trained: Tensor, means: _Means, o: Any) -> Tensor:
    """Computes R(kl(u, q)); 0 if its weight in the loss is 0."""
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
    c: Tensor, actor: Tensor, rewards: Tensor | None, positive_tokens: Tensor | None, means: _Means, o: Any
) -> Tensor:
    """Computes the mean NLL of tokens in sequences with a positive reward; 0 if its weight is 0."""
    if o.positive_example_nll_weight == 0:
        return c.new_zeros(())
    if rewards is None:
        raise ValueError(
            f"rewards=None: expected a tensor with positive_example_nll_weight={o.positive_example_nll_weight}; "
            "pass one reward for each sequence, or set the weight to 0"
        )
    positive = actor & (rewards > 0)[means.sequence]
    count = positive.sum() if o.positive_nll_normaliser == "local" else positive_tokens
    if count is None:
        raise ValueError(
            "positive_tokens=None: expected a count with positive_nll_normaliser='global'; "
            "pass the number of tokens in sequences with a positive reward, over the whole batch"
        )
    return token_mean(-c, positive, count.to(c.dtype), o.epsilon)


def _ratio_metrics(name: str, x: Tensor, actor: Tensor, means: _Means) -> dict[str, Tensor]:
    return {name: means.of_tokens(x, actor), f"{name}_min": smallest(x, actor), f"{name}_max": largest(x, actor)}


def _mismatch_metrics(p: Tensor, g: Tensor, scored: Tensor, means: _Means, kl_type: KLType) -> dict[str, Tensor]:
    """Computes the metrics of the distance between the policy before the update and the one that
    generated.
    """
    errors = {
        "token_mult_prob_error": (g - p).abs().exp(),
        "gen_kl_error": kl_estimate(logprobs=g, reference_logprobs=p, kl_type=kl_type),
        "policy_kl_error": kl_estimate(logprobs=p, reference_logprobs=g, kl_type=kl_type),
        "js_divergence_error": js_estimate(p, g),
    }
    return {name: means.of_tokens(error, scored) for name, error in errors.items()}
