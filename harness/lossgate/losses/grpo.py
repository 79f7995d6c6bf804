# SPDX-License-Identifier: Apache-2.0
"""Spec ``grpo``: open-instruct's group relative policy optimisation, with the policy losses of DAPO
and CISPO.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf, log
from typing import Literal

import torch
from torch import Tensor

import dense_losses
from lossgate.losses.shared.policy_gradients import (
    ADVANTAGES,
    ADVANTAGES_PER,
    GENERATION,
    NEAR,
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
    scattered,
)
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.coverage_goals import AtLeast, CoverageGoal
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.logit_filter import FilterOptions, labels_stay
from lossgate.specs.option import Option
from lossgate.specs.outputs import Metric
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues


class RhoOptions(Options):
    """The options of the correction for the sampler. Names and defaults are open-instruct's.

    Bounds are inclusive, and a bound of 0 is disabled.

    Raises:
        ValueError: if an option is out of range.
    """

    use_rho_correction: bool = option(
        True,
        "the policy loss is weighted by rho, the probability in old_logprobs over that in vllm_logprobs. If "
        "not, every weight is 1. Switch it off if old_logprobs come from vLLM",
    )
    rho_clamp_lower_bound: float = option(
        0.0, "the smallest weight of a token that is not dropped; below 1", choices=(0.0, 0.5)
    )
    rho_clamp_upper_bound: float = option(2.0, "the largest weight; above 1. 0 for no bound", choices=(2.0, 0.0, 1.5))
    rho_mask_lower_bound: float = option(
        0.0,
        "tokens with a smaller rho are dropped; below 1. With rho_mask_tv_divergence it bounds tv instead, and "
        "any positive number is allowed",
        choices=(0.0, 0.4),
    )
    rho_mask_upper_bound: float = option(
        0.0,
        "tokens with a larger rho are dropped; above 1. 0 for no bound. With rho_mask_tv_divergence it bounds "
        "tv instead, and any positive number is allowed; open-instruct still requires more than 1",
        choices=(0.0, 3.0),
    )
    rho_mask_sequence_level: bool = option(
        False,
        "every token has the rho of its sequence, a geometric mean, for the mask and as its weight. "
        "open-instruct documents the mask alone, but its code does both",
    )
    rho_mask_tv_divergence: bool = option(
        False,
        "the mask bounds apply to tv, the mean over the sequence of |rho - 1| of each token's own rho. Only "
        "tokens whose update would increase tv are dropped",
    )

    def __post_init__(self) -> None:
        below_1 = (0, 1, "0, or a number between 0 and 1")
        above_1 = (1, inf, "0, or a finite number above 1")
        of_tv = (0, inf, "0, or a finite positive number")
        bounds = {
            "rho_clamp_lower_bound": below_1,
            "rho_clamp_upper_bound": above_1,
            "rho_mask_lower_bound": of_tv if self.rho_mask_tv_divergence else below_1,
            "rho_mask_upper_bound": of_tv if self.rho_mask_tv_divergence else above_1,
        }
        for name, (low, high, expected) in bounds.items():
            value = getattr(self, name)
            if value != 0 and not low < value < high:
                raise ValueError(f"{name} is {value!r}; expected {expected}")
        if 0 < self.rho_mask_upper_bound <= self.rho_mask_lower_bound:
            raise ValueError(
                f"rho_mask_upper_bound is {self.rho_mask_upper_bound!r}; "
                f"expected 0 (no bound), or more than rho_mask_lower_bound={self.rho_mask_lower_bound!r}"
            )


class GrpoLossOptions(RhoOptions):
    """The options of the loss itself, with those of the correction for the sampler.

    Names and defaults are open-instruct's.

    Raises:
        ValueError: if an option is out of range.
    """

    loss_fn: Literal["dapo", "cispo"] = option(
        "dapo",
        "the policy loss: DAPO clips the ratio, CISPO makes the clamped ratio a weight without a gradient",
        choices=("dapo", "cispo"),
    )
    clip_lower: float = option(
        0.2,
        "the ratio is clipped from below at 1 minus this, by DAPO alone. ratio_clip_min in NeMo-RL",
        choices=(0.2, 0.1, 0.4),
    )
    clip_higher: float = option(
        0.272, "the ratio is clipped from above at 1 plus this. ratio_clip_max in NeMo-RL", choices=(0.272, 0.2, 0.5)
    )
    beta: float = option(
        0.05,
        "the factor of the KL term. Without a reference policy, set it to 0 and pass any finite reference_logprobs",
        choices=(0.05, 0.0, 0.5),
    )
    kl_estimator: Literal[0, 1, 2, 3] = option(
        2,
        "which estimate of KL(policy || reference) is the KL term. With d the log-ratio of policy to reference:"
        " 0 is d, 1 is d^2 / 2, 2 is exp(-d) - 1 + d, 3 is the ratio times d",
        choices=(2, 0, 1, 3),
    )
    loss_denominator: Literal["token"] | float = option(
        "token",
        'what divides the sums over tokens: "token" for the number of trained tokens of the whole batch, or a '
        "positive constant, as in Dr. GRPO",
        choices=("token", 7.0, 0.5, 512.0),
    )
    loss_scale: int = option(
        1,
        "the factor of the loss, but not of metrics. It is world_size // sequence_parallel_size in "
        "open-instruct: DeepSpeed averages over data-parallel ranks, so each rank must return that many times "
        "its part for the average to be the loss of the batch",
        choices=(1, 4),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_fn not in ("dapo", "cispo"):
            raise ValueError(f"loss_fn is {self.loss_fn!r}; expected 'dapo' or 'cispo'")
        if not 0 <= self.clip_lower <= 1:
            raise ValueError(f"clip_lower is {self.clip_lower!r}; expected a number between 0 and 1")
        for name in ("clip_higher", "beta"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a finite number, 0 or larger")
        if self.kl_estimator not in (0, 1, 2, 3):
            raise ValueError(f"kl_estimator is {self.kl_estimator!r}; expected 0, 1, 2 or 3")
        denominator = self.loss_denominator
        is_positive = not isinstance(denominator, str) and 0 < denominator < inf
        if denominator != "token" and not is_positive:
            raise ValueError(f"loss_denominator is {denominator!r}; expected 'token' or a finite positive number")
        if not isinstance(self.loss_scale, int) or self.loss_scale < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"loss_scale is {self.loss_scale!r}; expected a positive integer")


class GrpoOptions(FilterOptions, GrpoLossOptions):
    """The options of spec ``grpo``: those of the loss, then those of the logits."""

    def __post_init__(self) -> None:
        GrpoLossOptions.__post_init__(self)
        self.check_filter()


class GrpoBatch(Batch):
    """The fields that the spec adds to a packed batch."""

    old_logprobs: Tensor = field(
        "token", "log-probabilities of the labels, of the policy before the update", elsewhere=("prev_logprobs",)
    )
    reference_logprobs: Tensor = field("token", "log-probabilities of the labels, of the reference policy")
    vllm_logprobs: Tensor = field(
        "token",
        "log-probabilities of the labels, of the engine that sampled the tokens; "
        "NaN at a token means that it is not known",
        elsewhere=("generation_logprobs",),
    )
    advantages: Tensor = field("token", "the advantage of each token")


_GENERATION_EVERYWHERE = Option(
    name="generation_everywhere",
    meaning="what problems with generation 'everywhere' have beside ratios on every side of the bounds: ratios beyond "
    "10 nats (far), tokens whose log-probability the generating policy did not give (NaN), both or neither",
    default="both",
    choices=("both",),
    on_request=("far", "not known", "neither"),
)


def _draw(context: FieldContext) -> dict[str, Tensor]:
    o: GrpoOptions = context.options
    spans = clip_spans(log(max(1 - o.clip_lower, 0.05)), log(1 + o.clip_higher))
    ratios: dict[str, list[Span]] = {
        "inside": [spans["inside"]],
        "everywhere": list(spans.values()),
        "on-policy": [(0.0, 0.0)],
        # Large ratios, times exp of the distance to a far reference, stay within float32.
        # Beyond that, right kernels multiply 0 by infinity.
        "extreme": [*extreme_spans(context, (30.0, 42.0)), spans["inside"]],
    }
    chosen = ratios[context.scenario["ratios"]]
    old = context.logprobs - draw_in_spans(context.streams, "ratios", context.tokens, chosen)
    vllm = old - _log_rho(context)
    may_be_unknown = context.scenario["generation_everywhere"] in ("both", "not known")
    share_unknown = 0.1 if may_be_unknown and context.scenario["generation"] == "everywhere" else 0.0
    unknown = context.streams.uniform("unknown", context.tokens) < share_unknown
    return {
        "old_logprobs": draw_filtered_before(context, old),
        "reference_logprobs": draw_reference_logprobs(context),
        "vllm_logprobs": torch.where(unknown, float("nan"), vllm),
        "advantages": draw_advantages(context),
    }


def _log_rho(context: FieldContext) -> Tensor:
    """Draws log p_old - log p_vllm, ``[tokens]``. If generation is "everywhere", they lie on every
    side of the bounds of mask and clamp, and of the original's +-10 nats.
    """
    o: GrpoOptions = context.options
    low = o.rho_mask_lower_bound or o.rho_clamp_lower_bound or 0.3
    high = o.rho_mask_upper_bound or o.rho_clamp_upper_bound or 3.0
    beyond = [*clip_spans(log(low), log(max(high, 1.05))).values()]
    if context.scenario["generation_everywhere"] in ("both", "far"):
        beyond += [(11.0, 12.0), (-12.0, -11.0)]
    scenario: dict[str, Sequence[Span]] = {"near": NEAR, "equal": [(0.0, 0.0)], "everywhere": beyond}
    chosen = scenario[context.scenario["generation"]]
    if (o.rho_mask_sequence_level or o.rho_mask_tv_divergence) and context.scenario["generation"] != "equal":
        return scattered(context, "rho", draw_in_spans(context.streams, "rho", context.sequences, chosen))
    return draw_in_spans(context.streams, "rho", context.tokens, chosen)


def _covered(batch: GlobalBatch, o: GrpoOptions) -> set[str]:
    fields, trained = batch.fields, batch.fields["mask"]
    log_ratio = batch.policy - fields["old_logprobs"]
    edges = log(max(1 - o.clip_lower, 0.05)), log(1 + o.clip_higher)
    acting = trained & labels_stay(fields) & (fields["old_logprobs"] > -torch.inf)
    sides = set(covered_clip_goals("token", log_ratio[acting], fields["advantages"][acting], *edges))
    covered = {side for side in sides if o.loss_fn == "dapo" or "below" not in side}
    log_rho = (fields["old_logprobs"] - fields["vllm_logprobs"])[acting]
    if o.use_rho_correction and log_rho.isnan().any():
        covered.add("sampler's log-prob not known")
    if o.use_rho_correction and not o.rho_mask_sequence_level and not o.rho_mask_tv_divergence:
        upper = o.rho_mask_upper_bound or o.rho_clamp_upper_bound
        lower = o.rho_mask_lower_bound or o.rho_clamp_lower_bound
        if upper and (log_rho > log(upper)).any():
            covered.add("rho above its bounds")
        if lower and (log_rho < log(lower)).any():
            covered.add("rho below its bounds")
        if (log_rho.abs() > 10).any():
            covered.add("rho beyond 10 nats")
    has_gradient = (log_ratio > edges[0]) & (log_ratio < edges[1]) & (fields["advantages"] != 0)  # it is not clipped
    if o.use_rho_correction and o.rho_mask_tv_divergence and _signs_differ_beyond_tv(fields, acting, has_gradient, o):
        covered.add("signs differ beyond the bounds of tv")
    distance = (batch.policy - fields["reference_logprobs"])[trained].abs()
    if o.beta and (distance > 40).any():
        covered.add("KL input clamped")
    return covered


def _signs_differ_beyond_tv(fields: Mapping[str, Tensor], acting: Tensor, has_gradient: Tensor, o: GrpoOptions) -> bool:
    """Returns whether tv of some sequence is out of its bounds, and log rho of some of its tokens
    has another sign than their sum. Only tokens with a gradient count.
    """
    sequence = fields["sequence"][acting]
    log_rho = (fields["old_logprobs"] - fields["vllm_logprobs"])[acting].nan_to_num(0.0).clamp(-10, 10)
    zeros = log_rho.new_zeros(int(fields["sequence"].max()) + 1)
    sums, of_tv, count = (zeros.index_add(0, sequence, x) for x in (log_rho, log_rho.expm1().abs(), log_rho**0))
    tv = (of_tv / count.clamp(min=1))[sequence]
    beyond = (tv < o.rho_mask_lower_bound) | (tv > (o.rho_mask_upper_bound or inf))
    return bool((beyond & (log_rho * sums[sequence] < 0) & has_gradient[acting]).any())


_UNCORRECTED = {"use_rho_correction": (False,)}
_NEVER_BEYOND = {"generation": ("near", "equal")}
_OF_TOKENS = {**_UNCORRECTED, "rho_mask_sequence_level": (True,), "rho_mask_tv_divergence": (True,)}


_MEAN = "mean over trained tokens of"
_SHARE = "share of trained tokens"


def _dense(
    values: TokenValues, batch: GrpoBatch, options: GrpoOptions, *, with_metrics: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    return dense_losses.grpo(
        logprobs=values.logprobs,
        unfiltered_logprobs=values.given.get("unfiltered"),
        old_logprobs=batch.old_logprobs,
        reference_logprobs=batch.reference_logprobs,
        vllm_logprobs=batch.vllm_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        sequence=batch.sequence,
        sequences=batch.sequences,
        valid_tokens=batch.valid_tokens,
        options=options,
        with_metrics=with_metrics,
    )


def _metrics(values: TokenValues, batch: GrpoBatch, options: GrpoOptions) -> dict[str, Tensor]:
    return _dense(values, batch, options, with_metrics=True)[1]


@spec(
    "grpo",
    summary="group relative policy optimisation: DAPO or CISPO, with a KL penalty and corrections for the sampler",
    source="open-instruct compute_grpo_loss",
    batch=GrpoBatch,
    options=GrpoOptions,
    option_groups=(tuple(f.name for f in fields(RhoOptions)),),
    heads=("hidden", "logits", "logprobs"),
    uses=("logprobs", "unfiltered"),
    draw=_draw,
    scenarios=(RATIOS, RATIOS_EXTREME, ADVANTAGES, ADVANTAGES_PER, REFERENCE, GENERATION, _GENERATION_EVERYWHERE),
    kinks=True,
    stop_gradient=True,
    extra_metrics=_metrics,
    metrics={
        **{f"kl{k}": Metric(meaning=f"{_MEAN} KL estimate {k}") for k in range(4)},
        "kl_avg": Metric(meaning="beta times the mean of the chosen KL estimate"),
        "policy_avg": Metric(meaning=f"{_MEAN} the weighted policy loss"),
        "total_avg": Metric(meaning="policy_avg + kl_avg"),
        "clipfrac": Metric(meaning=f"{_SHARE} that are clipped, to a larger loss in DAPO, from above in CISPO"),
        "ratio_mean": Metric(meaning=f"{_MEAN} the importance ratio"),
        "ratio_square_mean": Metric(meaning=f"{_MEAN} the squared importance ratio"),
        "rho_mean": Metric(meaning=f"{_MEAN} rho"),
        "rho_weight": Metric(meaning=f"{_MEAN} the weight that rho becomes"),
        "rho_clipfrac": Metric(meaning=f"{_SHARE} whose rho is clamped"),
        "rho_drop_frac": Metric(meaning=f"{_SHARE} that are dropped"),
        "rho_drop_low_frac": Metric(meaning=f"{_SHARE} that are dropped below"),
        "rho_drop_high_frac": Metric(meaning=f"{_SHARE} that are dropped above"),
        "rho_min": Metric(meaning="smallest rho, inf without tokens", reduction="min"),
        "rho_max": Metric(meaning="largest rho, -inf without tokens", reduction="max"),
    },
    goals={
        **clip_goals("token", {}, {"loss_fn": ("cispo",), "clip_lower": AtLeast(1)}),
        "rho above its bounds": CoverageGoal(
            meaning="an importance weight above its bound",
            unreachable_if={
                **_OF_TOKENS,
                **_NEVER_BEYOND,
                "rho_mask_upper_bound": (0.0,),
                "rho_clamp_upper_bound": (0.0,),
            },
        ),
        "rho below its bounds": CoverageGoal(
            meaning="an importance weight below its bound",
            unreachable_if={
                **_OF_TOKENS,
                **_NEVER_BEYOND,
                "rho_mask_lower_bound": (0.0,),
                "rho_clamp_lower_bound": (0.0,),
            },
        ),
        "rho beyond 10 nats": CoverageGoal(
            meaning="an importance weight whose logarithm is clamped",
            unreachable_if={**_OF_TOKENS, **_NEVER_BEYOND, "generation_everywhere": ("not known", "neither")},
        ),
        "signs differ beyond the bounds of tv": CoverageGoal(
            meaning="a sequence whose tv is out of bounds, with weights above 1 and weights below",
            unreachable_if={**_UNCORRECTED, **_NEVER_BEYOND, "rho_mask_tv_divergence": (False,)},
        ),
        "sampler's log-prob not known": CoverageGoal(
            meaning="a NaN among the sampler's log-probabilities",
            unreachable_if={**_UNCORRECTED, **_NEVER_BEYOND, "generation_everywhere": ("far", "neither")},
        ),
        "KL input clamped": CoverageGoal(
            meaning="a log-ratio to the reference beyond 40 nats, where it is clamped",
            unreachable_if={"beta": (0.0,), "reference": ("near", "equal")},
            dtypes=("float32", "bfloat16"),  # kl3 is exp(40) there, which float16 does not hold
        ),
    },
    covered=_covered,
)
def grpo(values: TokenValues, batch: GrpoBatch, options: GrpoOptions) -> Tensor:
    """Group relative policy optimisation."""
    return _dense(values, batch, options, with_metrics=False)[0]
