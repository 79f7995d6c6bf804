# SPDX-License-Identifier: Apache-2.0
"""Spec ``clipped_pg``: the clipped policy gradient of NeMo-RL.

Its options cover PPO, GRPO, DAPO, REINFORCE, GSPO and CISPO.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, log
from typing import Literal, get_args

import torch
from torch import Tensor

import dense_losses
from dense_losses.importance import Truncation, TruncationType
from dense_losses.kl import KLType
from dense_losses.reductions import sequence_mean
from lossgate.losses.shared.policy_gradients import (
    ADVANTAGES,
    ADVANTAGES_PER,
    GENERATION,
    NEAR,
    OVERFLOW,
    RATIOS,
    RATIOS_EXTREME,
    REFERENCE,
    Span,
    clip_goals,
    clip_spans,
    covered_clip_goals,
    draw_advantages,
    draw_filtered_before,
    draw_in_spans,
    draw_reference_logprobs,
    extreme_spans,
    on_tokens,
    scattered,
)
from lossgate.losses.shared.sequences import SAMPLES, draw_sample_mask, trained_tokens
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.coverage_goals import AtLeast, CoverageGoal
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.logit_filter import FilterOptions, labels_stay
from lossgate.specs.outputs import Metric
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues

_GENERATION = replace(
    GENERATION,
    meaning=f"{GENERATION.meaning}, or so far off at some tokens that weights overflow",
    choices=(*GENERATION.choices, "extreme"),
)

PositiveNLLNormaliser = Literal["global", "local"]


class ClippedPgLossOptions(Options):
    """The options of the loss itself.

    Names and defaults are those of NeMo-RL's ``ClippedPGLossConfig``; the last two options are
    ours.

    Raises:
        ValueError: if an option is out of range, or does not go with another one.
    """

    disable_ppo_ratio: bool = option(
        False,
        "REINFORCE: the log-probability stands in place of the ratio, without a clip. force_on_policy_ratio "
        "overrides it",
    )
    token_level_loss: bool = option(
        True,
        "the loss is the mean over tokens. If not, it is the mean over sequences of each sequence's mean over "
        "its tokens",
    )
    sequence_level_importance_ratios: bool = option(
        False,
        "GSPO: one ratio for each sequence, from the mean of its tokens' log-ratios to prev_logprobs, and one "
        "importance weight, from the sum of those of prev_logprobs to generation_logprobs",
    )
    ratio_clip_min: float = option(0.2, "the ratio is clamped from below to 1 minus this", choices=(0.2, 0.1, 0.4))
    ratio_clip_max: float = option(0.2, "the ratio is clamped from above to 1 plus this", choices=(0.2, 0.28, 0.1))
    ratio_clip_c: float | None = option(
        None,
        "dual clip: the loss of a token with a negative advantage is at most minus the advantage times this "
        "number, which is above 1. None for no such bound",
        choices=(None, 3.0, 1.75),
    )
    reference_policy_kl_penalty: float = option(0.01, "beta, the weight of the KL penalty", choices=(0.01, 0.0, 0.5))
    reference_policy_kl_type: KLType = option(
        "k3",
        "the KL estimator of the penalty and of the metrics gen_kl_error and policy_kl_error",
        choices=("k3", "k1", "k2"),
    )
    kl_input_clamp_value: float | None = option(
        20.0,
        "the log-ratio of reference and policy is clamped to plus or minus this many nats. None for no clamp",
        choices=(20.0, None, 5.0),
    )
    kl_output_clamp_value: float | None = option(
        10.0,
        "the weighted KL estimate is clamped to plus or minus this many nats. None for no clamp",
        choices=(10.0, None, 2.0),
    )
    use_kl_in_reward: bool = option(
        False,
        "the penalty is part of the reward already, so that the loss has none",
    )
    use_importance_sampling_correction: bool = option(
        False,
        "the policy loss is weighted by the probability in prev_logprobs over that in generation_logprobs. If "
        "not, this weight is a metric only",
    )
    truncated_importance_sampling_type: TruncationType | None = option(
        None, "how the importance weight is bounded. None for no bound", choices=(None, "tis", "icepop", "seq-mask-tis")
    )
    truncated_importance_sampling_ratio: float | None = option(
        None,
        "the upper bound of the importance weight; for seq-mask-tis, of its geometric mean over a sequence",
        choices=(None, 2.0, 1.5),
    )
    truncated_importance_sampling_ratio_min: float | None = option(
        None, "the lower bound of the importance weight. None for 0, with tis only", choices=(None, 0.5)
    )
    use_on_policy_kl_approximation: bool = option(
        False,
        "the KL estimate is weighted by the policy's probability over that in generation_logprobs, which "
        "corrects for the policy that generated. If not, its weight is 1, which only adds the gradient of a score term",
    )
    force_on_policy_ratio: bool = option(
        False,
        "prev_logprobs are replaced by the policy's own, without their gradient: the ratio is 1, and there is no clip",
    )
    use_cispo: bool = option(False, "CISPO: the ratio, clamped on both sides, is a weight without a gradient")
    positive_example_nll_weight: float = option(
        0.0, "mu of VAPO, the weight of the mean NLL of tokens in sequences with a positive reward", choices=(0.0, 0.1)
    )
    positive_nll_normaliser: PositiveNLLNormaliser = option(
        "global",
        '"global" divides that NLL by positive_tokens. "local" divides it, as NeMo-RL does, by the number'
        " of such tokens in this call; the losses of parts then do not add up",
        choices=("global",),
    )
    epsilon: float = option(
        0.0,
        "added to every count that divides; 1e-8 in NeMo-RL's masked_mean. At 0, a mean over nothing is 0",
        choices=(0.0, 1e-8, 0.5),
    )

    @property
    def kl_penalty(self) -> float:
        """The weight of the KL penalty in the loss: beta, or 0 with ``use_kl_in_reward``."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def truncation(self) -> Truncation | None:
        """The bounds of the importance weights; None if they have none."""
        if self.truncated_importance_sampling_type is None or self.truncated_importance_sampling_ratio is None:
            return None
        minimum = self.truncated_importance_sampling_ratio_min or 0.0
        return Truncation(
            type=self.truncated_importance_sampling_type,
            minimum=minimum,
            maximum=self.truncated_importance_sampling_ratio,
        )

    def __post_init__(self) -> None:
        for holds, name, expected in _requirements(self):
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")


def _requirements(o: ClippedPgLossOptions) -> Iterator[tuple[bool, str, str]]:
    """Yields each requirement: whether it holds, the name of its option, and the expected value."""
    for name, choices in (
        ("reference_policy_kl_type", get_args(KLType)),
        ("truncated_importance_sampling_type", (None, *get_args(TruncationType))),
        ("positive_nll_normaliser", get_args(PositiveNLLNormaliser)),
    ):
        yield getattr(o, name) in choices, name, f"one of {choices}"
    for name in (
        "ratio_clip_min",
        "ratio_clip_max",
        "reference_policy_kl_penalty",
        "positive_example_nll_weight",
        "epsilon",
    ):
        yield 0 <= getattr(o, name) < inf, name, "a finite number, 0 or larger"
    for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
        yield getattr(o, name) is None or 0 < getattr(o, name) < inf, name, "None or a finite positive number"
    yield o.ratio_clip_c is None or 1 < o.ratio_clip_c < inf, "ratio_clip_c", "None or a finite number above 1"
    if o.sequence_level_importance_ratios:
        yield not o.token_level_loss, "token_level_loss", "False with sequence_level_importance_ratios=True"
    if o.use_cispo:
        for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
            yield not getattr(o, name), name, "False with use_cispo=True"
        yield o.ratio_clip_c is None, "ratio_clip_c", "None with use_cispo=True"
        yield o.token_level_loss, "token_level_loss", "True with use_cispo=True"
    yield from _truncation_requirements(o)


def _truncation_requirements(o: ClippedPgLossOptions) -> Iterator[tuple[bool, str, str]]:
    kind = o.truncated_importance_sampling_type
    low, high = o.truncated_importance_sampling_ratio_min, o.truncated_importance_sampling_ratio
    given = f"with truncated_importance_sampling_type={kind!r}"
    if kind is None:
        yield high is None, "truncated_importance_sampling_ratio", f"None {given}"
        yield low is None, "truncated_importance_sampling_ratio_min", f"None {given}"
        return
    yield o.use_importance_sampling_correction, "use_importance_sampling_correction", f"True {given}"
    yield (
        high is not None and 0 < high < inf,
        "truncated_importance_sampling_ratio",
        f"a finite positive number {given}",
    )
    yield low is not None or kind == "tis", "truncated_importance_sampling_ratio_min", f"a number {given}"
    yield (
        low is None or 0 <= low <= (high or 0),
        "truncated_importance_sampling_ratio_min",
        f"0 or more, and at most truncated_importance_sampling_ratio={high}",
    )
    yield (
        kind != "seq-mask-tis" or not o.sequence_level_importance_ratios,
        "sequence_level_importance_ratios",
        f"False {given}",
    )


class ClippedPgOptions(FilterOptions, ClippedPgLossOptions):
    """The options of spec ``clipped_pg``: those of the loss, then those of the logits."""

    def __post_init__(self) -> None:
        ClippedPgLossOptions.__post_init__(self)
        self.check_filter()


class ClippedPgBatch(Batch):
    """The fields that the spec adds to a packed batch."""

    prev_logprobs: Tensor = field(
        "token", "log-probabilities of the labels, of the policy before the update", elsewhere=("old_logprobs",)
    )
    generation_logprobs: Tensor = field(
        "token",
        "log-probabilities of the labels, of the policy that generated the tokens",
        elsewhere=("vllm_logprobs",),
    )
    reference_logprobs: Tensor = field("token", "log-probabilities of the labels, of the reference policy")
    advantages: Tensor = field("token", "the advantage of each token")
    rewards: Tensor = field("sequence", "the reward of each of this dp rank's sequences")
    sample_mask: Tensor = field(
        "sequence", "the sequence counts. mask is the token mask alone", dtype="bool", draw=draw_sample_mask
    )
    valid_sequences: Tensor = field(
        "",
        "sequences that count, of the whole batch",
        dtype="int64",
        count=lambda batch: batch.sample_mask.sum(),
    )
    positive_tokens: Tensor = field(
        "",
        "trained tokens in sequences that count and have a reward above 0, of the whole batch",
        dtype="int64",
        count=lambda batch: (trained_tokens(batch) & (batch.rewards > 0)[batch.sequence]).sum(),
    )


def _draw(context: FieldContext) -> dict[str, Tensor]:
    prev = context.logprobs - _log_ratios(context)
    before = context.logprobs if context.options.force_on_policy_ratio else prev
    return {
        "prev_logprobs": draw_filtered_before(context, prev),
        "generation_logprobs": before - _log_weights(context),
        "reference_logprobs": draw_reference_logprobs(context, context.options.kl_input_clamp_value),
        "advantages": draw_advantages(context),
        "rewards": context.streams.integers("rewards", 3, context.sequences) - 1.0,
    }


def _log_ratios(context: FieldContext) -> Tensor:
    """Draws log p - log p_prev, ``[tokens]``."""
    o: ClippedPgOptions = context.options
    low, high = log(max(1 - o.ratio_clip_min, 0.05)), log(1 + o.ratio_clip_max)
    dual_clip = log(o.ratio_clip_c) if o.ratio_clip_c else 0.0
    if dual_clip <= high + 0.1:  # there is none, or it is not clear of the clip
        dual_clip = max(log(3), high + 0.2)
    spans = clip_spans(low, high, dual_clip)
    scenario: dict[str, list[Span]] = {
        "inside": [spans["inside"]],
        "everywhere": list(spans.values()),
        "on-policy": [(0.0, 0.0)],
        # Large ratios, times exp of the distance to a far reference, stay within float32.
        # Beyond that, right kernels multiply 0 by infinity.
        "extreme": [*extreme_spans(context, (28.0, 34.0)), spans["inside"]],
    }
    chosen = scenario[context.scenario["ratios"]]
    if not o.sequence_level_importance_ratios:
        return draw_in_spans(context.streams, "ratios", context.tokens, chosen)
    per_sequence = draw_in_spans(context.streams, "ratios", context.sequences, chosen)
    if context.scenario["ratios"] == "on-policy":
        return on_tokens(context, per_sequence)
    return scattered(context, "ratios", per_sequence)


def _log_weights(context: FieldContext) -> Tensor:
    """Draws log p_prev - log p_generation, ``[tokens]``."""
    o: ClippedPgOptions = context.options
    low, high = o.truncated_importance_sampling_ratio_min or 0.1, o.truncated_importance_sampling_ratio or 3.0
    spans = clip_spans(log(low), log(high))
    scenario: dict[str, Sequence[Span]] = {
        "near": NEAR,
        "equal": [(0.0, 0.0)],
        "everywhere": list(spans.values()),
    }
    if context.scenario["generation"] == "extreme":
        return _log_weights_that_overflow(context)
    chosen = scenario[context.scenario["generation"]]
    if o.truncated_importance_sampling_type == "seq-mask-tis":
        # Some tokens lie on another side of the bounds than their sequence does.
        scatter = 0.0 if context.scenario["generation"] == "equal" else 0.5
        per_sequence = on_tokens(context, draw_in_spans(context.streams, "weights", context.sequences, chosen))
        return per_sequence + scatter * context.streams.normal("weight scatter", context.tokens)
    if o.sequence_level_importance_ratios and context.scenario["generation"] != "equal":
        # The sum over a sequence is what counts.
        lengths = torch.tensor(context.batch.partition.lengths).clamp(min=1)
        of_sequences = draw_in_spans(context.streams, "weights", context.sequences, chosen)
        scatter = 0.2 * context.streams.normal("weight scatter", context.tokens)
        return on_tokens(context, of_sequences / lengths) + scatter
    return draw_in_spans(context.streams, "weights", context.tokens, chosen)


_CLEAR_OF_0 = -0.1
"""The metric approx_entropy multiplies a log-probability by a number that overflows. If it rounds
to 0, the product is not a number.
"""


def _log_weights_that_overflow(context: FieldContext) -> Tensor:
    """Draws log p_prev - log p_generation, ``[tokens]``. At some tokens exp of it is infinite."""
    near, over = (
        draw_in_spans(context.streams, stream, context.tokens, spans)
        for stream, spans in (("weights", NEAR), ("weights that overflow", [OVERFLOW]))
    )
    chosen = context.streams.uniform("which overflow", context.tokens) < 0.5
    return torch.where(chosen & (context.logprobs < _CLEAR_OF_0), over, near)


def _covered(batch: GlobalBatch, options: ClippedPgOptions) -> set[str]:
    own, fields, covered = ClippedPgBatch.of(batch.known), batch.fields, set[str]()
    trained = trained_tokens(own)
    if trained.any() and (own.mask & ~trained).any():
        covered.add("sequence that does not count")
    trained = trained & labels_stay(fields) & (fields["prev_logprobs"] > -torch.inf)
    log_ratio, advantage = batch.policy - fields["prev_logprobs"], fields["advantages"]
    edges = log(max(1 - options.ratio_clip_min, 1e-9)), log(1 + options.ratio_clip_max)
    if options.sequence_level_importance_ratios:
        log_ratio = sequence_mean(log_ratio, own.mask, own.sequence, own.sequences)[own.sequence]
        covered |= set(covered_clip_goals("sequence", log_ratio[trained], advantage[trained], *edges))
    elif not options.disable_ppo_ratio and not options.force_on_policy_ratio:
        covered |= set(covered_clip_goals("token", log_ratio[trained], advantage[trained], *edges))
    if options.truncation and not options.sequence_level_importance_ratios:
        before = batch.policy if options.force_on_policy_ratio else fields["prev_logprobs"]
        log_weight = (before - fields["generation_logprobs"])[trained]
        if (log_weight > log(options.truncation.maximum)).any():
            covered.add("weight above its bound")
        if options.truncation.minimum and (log_weight < log(options.truncation.minimum)).any():
            covered.add("weight below its bound")
    return covered


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
    "generation": ("near", "equal"),
}

_MEAN = "mean over trained tokens of"


_METRICS = {
    "kl_penalty": Metric(meaning="the KL penalty before its weight, reduced like the loss"),
    "probs_ratio": Metric(meaning=f"{_MEAN} the importance ratio"),
    "probs_ratio_clamped": Metric(meaning=f"{_MEAN} the clamped ratio"),
    "probs_ratio_min": Metric(meaning="smallest ratio, inf without tokens", reduction="min"),
    "probs_ratio_max": Metric(meaning="largest ratio, -inf without tokens", reduction="max"),
    "probs_ratio_clamped_min": Metric(meaning="smallest clamped ratio", reduction="min"),
    "probs_ratio_clamped_max": Metric(meaning="largest clamped ratio", reduction="max"),
    "approx_entropy": Metric(meaning=f"{_MEAN} -exp(c - g) c"),
    "token_mult_prob_error": Metric(meaning=f"{_MEAN} exp |g - p|"),
    "gen_kl_error": Metric(meaning=f"{_MEAN} KL(g || p)"),
    "policy_kl_error": Metric(meaning=f"{_MEAN} KL(p || g)"),
    "js_divergence_error": Metric(meaning=f"{_MEAN} the estimated Jensen-Shannon divergence of prev and generation"),
    "sampling_importance_ratio": Metric(meaning="mean importance weight after truncation; over sequences for GSPO"),
    "is_oob_ratio": Metric(meaning="share of weights out of bounds, if truncated; over sequences for seq-mask-tis"),
    "num_valid_samples": Metric(meaning="sequences that count"),
    "positive_nll_loss": Metric(meaning="NLL of tokens in sequences with a reward above 0, before its weight"),
}


def _dense(
    values: TokenValues, batch: ClippedPgBatch, options: ClippedPgOptions, *, with_metrics: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    return dense_losses.clipped_pg(
        logprobs=values.logprobs,
        unfiltered_logprobs=values.given.get("unfiltered"),
        prev_logprobs=batch.prev_logprobs,
        generation_logprobs=batch.generation_logprobs,
        reference_logprobs=batch.reference_logprobs,
        advantages=batch.advantages,
        rewards=batch.rewards,
        mask=batch.mask,
        sequence=batch.sequence,
        sample_mask=batch.sample_mask,
        valid_tokens=batch.valid_tokens,
        valid_sequences=batch.valid_sequences,
        positive_tokens=batch.positive_tokens,
        options=options,
        with_metrics=with_metrics,
    )


def _metrics(values: TokenValues, batch: ClippedPgBatch, options: ClippedPgOptions) -> dict[str, Tensor]:
    metrics = _dense(values, batch, options, with_metrics=True)[1]
    return {name: metric for name, metric in metrics.items() if name != "loss"}


@spec(
    "clipped_pg",
    summary="clipped policy gradient: PPO, GRPO, DAPO, REINFORCE, GSPO, CISPO, with KL penalty and off-policy weights",
    source="NeMo-RL ClippedPGLossFn",
    batch=ClippedPgBatch,
    options=ClippedPgOptions,
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
    heads=("hidden", "logits", "logprobs"),
    uses=("logprobs", "unfiltered"),
    draw=_draw,
    trained=trained_tokens,
    scenarios=(RATIOS, RATIOS_EXTREME, ADVANTAGES, ADVANTAGES_PER, REFERENCE, _GENERATION, SAMPLES),
    kinks=True,
    stop_gradient=True,
    extra_metrics=_metrics,
    metrics=_METRICS,
    goals={
        "sequence that does not count": CoverageGoal(
            meaning="a sequence with trained tokens that the sample mask leaves out, while another one counts",
            unreachable_if={"samples": ("all",)},
        ),
        **clip_goals("token", _NO_RATIO, _NOTHING_BELOW),
        **clip_goals("sequence", _NO_SEQUENCE_RATIO, _NOTHING_BELOW),
        "weight above its bound": CoverageGoal(
            meaning="an importance weight above its bound", unreachable_if=_UNBOUNDED
        ),
        "weight below its bound": CoverageGoal(
            meaning="an importance weight below its bound",
            unreachable_if={**_UNBOUNDED, "truncated_importance_sampling_ratio_min": (None, 0.0)},
        ),
    },
    covered=_covered,
)
def clipped_pg(values: TokenValues, batch: ClippedPgBatch, options: ClippedPgOptions) -> Tensor:
    """The clipped policy gradient."""
    return _dense(values, batch, options, with_metrics=False)[0]
