# SPDX-License-Identifier: Apache-2.0
"""Spec ``grpo``: open-instruct's group relative policy optimisation, with the policy losses of DAPO
and CISPO.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import log

import torch
from torch import Tensor

import dense_losses
from dense_losses.rho import RhoOptions
from lossgate.losses.shared.clips import clip_goals, covered_clip_goals
from lossgate.losses.shared.policies import (
    ADVANTAGES,
    ADVANTAGES_PER,
    GENERATION,
    NEAR,
    RATIOS,
    REFERENCE,
    UNDERFLOW,
    Span,
    clip_spans,
    draw_advantages,
    draw_filtered_before,
    draw_in_spans,
    draw_reference_logprobs,
    on_tokens,
)
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.coverage import AtLeast, CoverageGoal
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.inputs import Batch
from lossgate.specs.logit_filter import FilterOptions, labels_stay
from lossgate.specs.metric import Metric
from lossgate.specs.mistakes import Mistake, fixed_option, mistaken_choice
from lossgate.specs.record import field
from lossgate.specs.token_values import TokenValues


class GrpoOptions(FilterOptions, dense_losses.GrpoOptions):
    """The options of spec ``grpo``."""

    def __post_init__(self) -> None:
        dense_losses.GrpoOptions.__post_init__(self)
        self.check_filter()


class GrpoBatch(Batch):
    """What the spec adds to a packed batch."""

    old_logprobs: Tensor = field("token", "log-probabilities of the labels, of the policy before the update")
    reference_logprobs: Tensor = field("token", "log-probabilities of the labels, of the reference policy")
    vllm_logprobs: Tensor = field(
        "token",
        "log-probabilities of the labels, of the engine that sampled the tokens; "
        "NaN at a token means that it is not known",
    )
    advantages: Tensor = field("token", "the advantage of each token")


def _draw(context: FieldContext) -> dict[str, Tensor]:
    o: GrpoOptions = context.options
    spans = clip_spans(log(max(1 - o.clip_lower, 0.05)), log(1 + o.clip_higher))
    ratios: dict[str, list[Span]] = {
        "inside": [spans["inside"]],
        "everywhere": list(spans.values()),
        "on-policy": [(0.0, 0.0)],
        # Large ratios, times exp of the distance to a far reference, stay within float32.
        # Beyond that, right kernels multiply 0 by infinity.
        "extreme": [*UNDERFLOW, (10.0, 20.0), (30.0, 42.0), spans["inside"]],
    }
    old = context.logprobs - draw_in_spans(
        context.streams, "ratios", context.tokens, ratios[context.scenario["ratios"]]
    )
    vllm = old - _log_rho(context)
    unknown = context.streams.uniform("unknown", context.tokens) < (
        0.1 if context.scenario["generation"] == "everywhere" else 0.0
    )
    return {
        "old_logprobs": draw_filtered_before(context, old),
        "reference_logprobs": draw_reference_logprobs(context),
        "vllm_logprobs": torch.where(unknown, float("nan"), vllm),
        "advantages": draw_advantages(context),
    }


def _log_rho(context: FieldContext) -> Tensor:
    """log p_old - log p_vllm, ``[tokens]``: on every side of the bounds of mask and clamp, and of
    the original's +-10 nats.
    """
    o: GrpoOptions = context.options
    low, high = (
        o.rho_mask_lower_bound or o.rho_clamp_lower_bound or 0.3,
        o.rho_mask_upper_bound or o.rho_clamp_upper_bound or 3.0,
    )
    beyond = [*clip_spans(log(low), log(max(high, 1.05))).values(), (11.0, 12.0), (-12.0, -11.0)]
    scenario: dict[str, Sequence[Span]] = {"near": NEAR, "equal": [(0.0, 0.0)], "everywhere": beyond}
    chosen = scenario[context.scenario["generation"]]
    if o.rho_mask_sequence_level or o.rho_mask_tv_divergence:
        return on_tokens(
            context, draw_in_spans(context.streams, "rho", context.sequences, chosen)
        ) + 0.01 * context.streams.normal("rho scatter", context.tokens)
    return draw_in_spans(context.streams, "rho", context.tokens, chosen)


def _covered(batch: GlobalBatch, o: GrpoOptions) -> set[str]:
    fields, trained = batch.fields, batch.fields["mask"]
    covered = set[str]()
    ratio, edges = batch.policy - fields["old_logprobs"], (log(max(1 - o.clip_lower, 0.05)), log(1 + o.clip_higher))
    acting = trained & labels_stay(fields) & (fields["old_logprobs"] > -torch.inf)
    sides = set(covered_clip_goals("token", ratio[acting], fields["advantages"][acting], *edges))
    covered |= {side for side in sides if o.loss_fn == "dapo" or "below" not in side}
    rho = (fields["old_logprobs"] - fields["vllm_logprobs"])[acting]
    if o.use_rho_correction and bool(rho.isnan().any()):
        covered.add("sampler's log-prob not known")
    if o.use_rho_correction and not o.rho_mask_sequence_level and not o.rho_mask_tv_divergence:
        upper, lower = (
            o.rho_mask_upper_bound or o.rho_clamp_upper_bound,
            o.rho_mask_lower_bound or o.rho_clamp_lower_bound,
        )
        covered |= {"rho above its bounds"} if upper and bool((rho > log(upper)).any()) else set()
        covered |= {"rho below its bounds"} if lower and bool((rho < log(lower)).any()) else set()
        covered |= {"rho beyond 10 nats"} if bool((rho.abs() > 10).any()) else set()
    distance = (batch.policy - fields["reference_logprobs"])[trained].abs()
    return covered | ({"KL input clamped"} if o.beta and bool((distance > 40).any()) else set())


_UNCORRECTED = {"use_rho_correction": (False,)}
_NEVER_BEYOND = {"generation": ("near", "equal")}
_OF_TOKENS = {**_UNCORRECTED, "rho_mask_sequence_level": (True,), "rho_mask_tv_divergence": (True,)}


_MEAN = "mean over trained tokens of"
_SHARE = "share of trained tokens"
_SWITCH = (False, True)


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
    choices={
        "use_rho_correction": (True, False),
        "rho_clamp_lower_bound": (0.0, 0.5),
        "rho_clamp_upper_bound": (2.0, 0.0, 1.5),
        "rho_mask_lower_bound": (0.0, 0.4),
        "rho_mask_upper_bound": (0.0, 3.0),
        "rho_mask_sequence_level": _SWITCH,
        "rho_mask_tv_divergence": _SWITCH,
        "loss_fn": ("dapo", "cispo"),
        "clip_lower": (0.2, 0.1, 0.4),
        "clip_higher": (0.272, 0.2, 0.5),
        "beta": (0.05, 0.0, 0.5),
        "kl_estimator": (2, 0, 1, 3),
        "loss_denominator": ("token", 7.0, 0.5, 512.0),
        "loss_scale": (1, 4),
    },
    option_groups=(tuple(f.name for f in fields(RhoOptions)),),
    heads=("hidden", "logits", "logprobs"),
    uses=("logprobs", "unfiltered"),
    draw=_draw,
    scenarios=(RATIOS, ADVANTAGES, ADVANTAGES_PER, REFERENCE, GENERATION),
    mistakes=(
        Mistake(
            name="lower clip too wide",
            sentence="the lower clip is 0.05 too wide",
            options=lambda o: replace(o, clip_lower=o.clip_lower + 0.05),
        ),
        mistaken_choice("kl_estimator", 3, 2),
        mistaken_choice("rho_clamp_upper_bound", 0.0, 2.0),
        fixed_option("top_k", None, "top-k is ignored"),
        fixed_option("top_p", 1.0, "top-p is ignored"),
    ),
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
        "ratio_square_mean": Metric(meaning=f"{_MEAN} its square"),
        "rho_mean": Metric(meaning=f"{_MEAN} rho"),
        "rho_weight": Metric(meaning=f"{_MEAN} the weight made of it"),
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
            meaning="an importance weight whose logarithm is clamped", unreachable_if={**_OF_TOKENS, **_NEVER_BEYOND}
        ),
        "sampler's log-prob not known": CoverageGoal(
            meaning="a NaN among the sampler's log-probabilities", unreachable_if={**_UNCORRECTED, **_NEVER_BEYOND}
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
