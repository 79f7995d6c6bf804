# SPDX-License-Identifier: Apache-2.0
"""Spec ``clipped_pg``: the clipped policy gradient of NeMo-RL, which holds PPO, GRPO, DAPO, REINFORCE, GSPO and CISPO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from dense_losses import ClippedPGOptions, clipped_pg
from dense_losses.reductions import sequence_mean
from lossgate.losses.policies import (
    NEAR,
    Span,
    advantages,
    clip_spans,
    of_tokens,
    place,
    reference_logprobs,
    sample_mask,
)
from lossgate.losses.scenarios import ADVANTAGES, GENERATION, RATIOS, REFERENCE, SAMPLES
from lossgate.problems.batch import Batch
from lossgate.specs.coverage import TOKEN_BRANCHES, clip_sides, trained_tokens, visited_sides, visited_tokens
from lossgate.specs.inputs import HiddenHead, LogitsHead, LogprobsHead, PackedBatch
from lossgate.specs.option import TEMPERATURE, Between, options_of
from lossgate.specs.spec import AtLeast, Branch, Draft, Metric, Spec, TokenValues


@dataclass(frozen=True, kw_only=True)
class ClippedPGSpecOptions(ClippedPGOptions):
    """What a kernel of spec ``clipped_pg`` is told."""

    temperature: float = 1.0
    """Divides the logits."""


@dataclass(frozen=True, kw_only=True)
class ClippedPGBatch(PackedBatch):
    """What the spec adds to a packed batch. S is the number of this dp rank's sequences."""

    prev_logprobs: Tensor
    """``[T]``, of the policy before the update."""
    generation_logprobs: Tensor
    """``[T]``, of the policy that generated."""
    reference_logprobs: Tensor
    """``[T]``, of the reference policy."""
    advantages: Tensor
    """``[T]``."""
    rewards: Tensor
    """``[S]``."""
    sample_mask: Tensor
    """``[S]`` bool: the sequence counts. ``mask`` is the token mask alone."""
    valid_sequences: Tensor
    """Scalar int64: sequences that count, of the whole batch."""
    positive_tokens: Tensor
    """Scalar int64: trained tokens in sequences that count and have a reward above 0, of the whole batch."""


@dataclass(frozen=True, kw_only=True)
class ClippedPGHiddenInputs(HiddenHead, ClippedPGBatch):
    """Head "hidden"."""


@dataclass(frozen=True, kw_only=True)
class ClippedPGLogitsInputs(LogitsHead, ClippedPGBatch):
    """Head "logits"."""


@dataclass(frozen=True, kw_only=True)
class ClippedPGLogprobsInputs(LogprobsHead, ClippedPGBatch):
    """Head "logprobs"."""


_POLICIES = ("prev_logprobs", "generation_logprobs", "reference_logprobs")


def _loss(
    values: TokenValues, batch: Mapping[str, Tensor], options: ClippedPGOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    names = (
        *_POLICIES,
        "advantages",
        "mask",
        "sequence",
        "sample_mask",
        "valid_tokens",
        "valid_sequences",
        "rewards",
        "positive_tokens",
    )
    loss, metrics = clipped_pg(logprobs=values.logprobs, options=options, **{name: batch[name] for name in names})
    del metrics["loss"]  # the loss itself
    return loss, metrics


def _make_fields(draft: Draft) -> dict[str, Tensor]:
    prev = draft.logprobs - _log_ratios(draft)
    before = draft.logprobs if draft.options.force_on_policy_ratio else prev  # what takes its place
    return {
        "prev_logprobs": prev,
        "generation_logprobs": before - _log_weights(draft),
        "reference_logprobs": reference_logprobs(draft, draft.options.kl_input_clamp_value),
        "advantages": advantages(draft),
        "rewards": draft.bits.integers("rewards", 3, draft.sequences) - 1.0,
        "sample_mask": sample_mask(draft),
        "positive_tokens": torch.tensor(0),
    }


def _log_ratios(draft: Draft) -> Tensor:
    """log p - log p_prev, ``[tokens]``."""
    o: ClippedPGOptions = draft.options
    edges = log(max(1 - o.ratio_clip_min, 0.05)), log(1 + o.ratio_clip_max)
    spans = clip_spans(
        *edges,
        log(o.ratio_clip_c) if o.ratio_clip_c and log(o.ratio_clip_c) > edges[1] + 0.1 else max(log(3), edges[1] + 0.2),
    )
    scenario: dict[str, list[Span]] = {
        "inside": [spans["inside"]],
        "everywhere": list(spans.values()),
        "on-policy": [(0.0, 0.0)],
        "extreme": [
            (-40.0, -20.0),
            (10.0, 20.0),
            (28.0, 34.0),
            spans["inside"],
        ],  # times exp of a far reference: within float32
    }
    chosen = scenario[draft.scenario["ratios"]]
    if not o.sequence_level_importance_ratios:
        return place(draft.bits, "ratios", draft.tokens, chosen)
    scatter = 0.0 if draft.scenario["ratios"] == "on-policy" else 0.02
    return of_tokens(draft, place(draft.bits, "ratios", draft.sequences, chosen)) + scatter * draft.bits.normal(
        "ratio scatter", draft.tokens
    )


def _log_weights(draft: Draft) -> Tensor:
    """log p_prev - log p_generation, ``[tokens]``."""
    o: ClippedPGOptions = draft.options
    low, high = o.truncated_importance_sampling_ratio_min or 0.1, o.truncated_importance_sampling_ratio or 3.0
    spans = clip_spans(log(low), log(high))
    scenario: dict[str, Sequence[Span]] = {"near": NEAR, "equal": [(0.0, 0.0)], "everywhere": list(spans.values())}
    chosen = scenario[draft.scenario["generation"]]
    if o.truncated_importance_sampling_type == "seq-mask-tis":
        scatter = (
            0.0 if draft.scenario["generation"] == "equal" else 0.5
        )  # so that tokens lie on other sides than their sequence
        return of_tokens(draft, place(draft.bits, "weights", draft.sequences, chosen)) + scatter * draft.bits.normal(
            "weight scatter", draft.tokens
        )
    if (
        o.sequence_level_importance_ratios and draft.scenario["generation"] != "equal"
    ):  # their sum over a sequence counts
        lengths = torch.tensor(draft.batch.partition.padded_lengths).clamp(min=1)
        scatter = 0.2 * draft.bits.normal("weight scatter", draft.tokens)
        return of_tokens(draft, place(draft.bits, "weights", draft.sequences, chosen) / lengths) + scatter
    return place(draft.bits, "weights", draft.tokens, chosen)


def _visited(batch: Batch) -> set[str]:
    options = CLIPPED_PG.make_options(batch.problem.options)
    fields, trained = batch.fields, trained_tokens(batch)
    seen = visited_tokens(batch)
    seen |= {"sequence that does not count"} if not fields["sample_mask"].all() else set()
    # log p - log p_prev again, from what was made of it
    ratio, advantage = batch.policy - fields["prev_logprobs"], fields["advantages"]
    edges = log(max(1 - options.ratio_clip_min, 1e-9)), log(1 + options.ratio_clip_max)
    if options.sequence_level_importance_ratios:
        ratio = sequence_mean(ratio, fields["mask"], fields["sequence"], len(fields["lengths"]))[fields["sequence"]]
        seen |= set(visited_sides("sequence", ratio[trained], advantage[trained], *edges))
    elif not options.disable_ppo_ratio and not options.force_on_policy_ratio:
        seen |= set(visited_sides("token", ratio[trained], advantage[trained], *edges))
    if options.truncation and not options.sequence_level_importance_ratios:
        before = batch.policy if options.force_on_policy_ratio else fields["prev_logprobs"]
        outside = (before - fields["generation_logprobs"])[trained]
        seen |= {"weight above its bound"} if bool((outside > log(options.truncation.maximum)).any()) else set()
        if options.truncation.minimum and bool((outside < log(options.truncation.minimum)).any()):
            seen.add("weight below its bound")
    return seen


_NO_RATIO = {
    "disable_ppo_ratio": (True,),
    "force_on_policy_ratio": (True,),
    "sequence_level_importance_ratios": (True,),
}
_NO_SEQUENCE_RATIO = {"sequence_level_importance_ratios": (False,)}
_NOTHING_BELOW = {"ratio_clip_min": AtLeast(1)}
_UNBOUNDED = {
    "truncated_importance_sampling_type": (None,),
    "truncated_importance_sampling_ratio": (None,),
    "sequence_level_importance_ratios": (True,),
}

_MEAN = "mean over trained tokens of"
_METRICS = {
    "kl_penalty": Metric(meaning="the KL penalty before its weight, reduced like the loss"),
    "probs_ratio": Metric(meaning=f"{_MEAN} the importance ratio"),
    "probs_ratio_clamped": Metric(meaning=f"{_MEAN} the clamped ratio"),
    "probs_ratio_min": Metric(meaning="least ratio, inf without tokens", reduction="min"),
    "probs_ratio_max": Metric(meaning="greatest ratio, -inf without tokens", reduction="max"),
    "probs_ratio_clamped_min": Metric(meaning="least clamped ratio", reduction="min"),
    "probs_ratio_clamped_max": Metric(meaning="greatest clamped ratio", reduction="max"),
    "approx_entropy": Metric(meaning=f"{_MEAN} -exp(c - g) c"),
    "token_mult_prob_error": Metric(meaning=f"{_MEAN} exp |g - p|"),
    "gen_kl_error": Metric(meaning=f"{_MEAN} KL(g || p)"),
    "policy_kl_error": Metric(meaning=f"{_MEAN} KL(p || g)"),
    "js_divergence_error": Metric(meaning=f"{_MEAN} the Jensen-Shannon divergence of p and g"),
    "sampling_importance_ratio": Metric(meaning="mean importance weight after truncation; over sequences for GSPO"),
    "is_oob_ratio": Metric(meaning="share of weights out of bounds, if truncated; over sequences for seq-mask-tis"),
    "num_valid_samples": Metric(meaning="sequences that count"),
    "positive_nll_loss": Metric(meaning="NLL of tokens in sequences with a reward above 0, before its weight"),
}

_SWITCH = (False, True)

CLIPPED_PG = Spec(
    name="clipped_pg",
    summary="clipped policy gradient: PPO, GRPO, DAPO, REINFORCE, GSPO, CISPO, with KL penalty and off-policy weights",
    source="NeMo-RL ClippedPGLossFn",
    loss=_loss,
    options_type=ClippedPGSpecOptions,
    options=options_of(
        ClippedPGSpecOptions,
        {
            "disable_ppo_ratio": _SWITCH,
            "token_level_loss": (True, False),
            "sequence_level_importance_ratios": _SWITCH,
            "ratio_clip_min": (0.2, 0.1, 0.4),
            "ratio_clip_max": (0.2, 0.28, 0.1),
            "ratio_clip_c": (None, 3.0, 1.75),
            "reference_policy_kl_penalty": (0.01, 0.0, 0.5),
            "reference_policy_kl_type": ("k3", "k1", "k2"),
            "kl_input_clamp_value": (20.0, None, 5.0),
            "kl_output_clamp_value": (10.0, None, 2.0),
            "use_kl_in_reward": _SWITCH,
            "use_importance_sampling_correction": _SWITCH,
            "truncated_importance_sampling_type": (None, "tis", "icepop", "seq-mask-tis"),
            "truncated_importance_sampling_ratio": (None, 2.0, 1.5),
            "truncated_importance_sampling_ratio_min": (None, 0.5),
            "use_on_policy_kl_approximation": _SWITCH,
            "force_on_policy_ratio": _SWITCH,
            "use_cispo": _SWITCH,
            "positive_example_nll_weight": (0.0, 0.1),
            "positive_nll_normaliser": ("global",),
            "epsilon": (0.0, 1e-8, 0.5),
            "temperature": Between(TEMPERATURE),
        },
    ),
    option_groups=(
        (
            "token_level_loss",
            "sequence_level_importance_ratios",
            "use_cispo",
            "disable_ppo_ratio",
            "force_on_policy_ratio",
        ),
        (
            "use_importance_sampling_correction",
            "truncated_importance_sampling_type",
            "truncated_importance_sampling_ratio",
            "truncated_importance_sampling_ratio_min",
        ),
    ),
    inputs={"hidden": ClippedPGHiddenInputs, "logits": ClippedPGLogitsInputs, "logprobs": ClippedPGLogprobsInputs},
    fields={
        **dict.fromkeys((*_POLICIES, "advantages"), ("token",)),
        "rewards": ("sequence",),
        "sample_mask": ("sequence",),
        "valid_sequences": (),
        "positive_tokens": (),
    },
    make_fields=_make_fields,
    scenario=(RATIOS, ADVANTAGES, REFERENCE, GENERATION, SAMPLES),
    kinks=True,
    metrics=_METRICS,
    branches={
        **TOKEN_BRANCHES,
        "sequence that does not count": Branch(meaning="a sequence that the sample mask leaves out"),
        **clip_sides("token", _NO_RATIO, _NOTHING_BELOW),
        **clip_sides("sequence", _NO_SEQUENCE_RATIO, _NOTHING_BELOW),
        "weight above its bound": Branch(meaning="an importance weight above its bound", barred_by=_UNBOUNDED),
        "weight below its bound": Branch(
            meaning="an importance weight below its bound",
            barred_by={**_UNBOUNDED, "truncated_importance_sampling_ratio_min": (None, 0.0)},
        ),
    },
    visited=_visited,
)
