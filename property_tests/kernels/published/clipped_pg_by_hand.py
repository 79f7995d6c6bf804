# SPDX-License-Identifier: Apache-2.0
"""Calls of NeMo-RL's clipped policy gradient, and their results by hand."""

from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Any

from property_tests.kernels.published.exact_logits import mean

Rows = list[list[float]]
HALF, SAME, MORE = log(0.5) - 1, -1.0, log(1.5) - 1
"""Log-probabilities whose ratios to an old one of -1 are 0.5, 1 and 1.5."""
GSPO: dict[str, Any] = {"sequence_level_importance_ratios": True, "token_level_loss": False}
WEIGHTED: dict[str, Any] = {"use_importance_sampling_correction": True}
GENERATION = [-0.5, -1.5, -0.8]
WEIGHTS = [exp(-0.5), exp(0.5), exp(-0.2)]
"""exp(old - GENERATION) for an old log-probability of -1."""
MEAN_RATIO = (0.5 * 1.5) ** (1 / 3)


def truncated(kind: str, maximum: float, minimum: float | None = None) -> dict[str, Any]:
    return {
        **WEIGHTED,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": maximum,
        "truncated_importance_sampling_ratio_min": minimum,
    }


@dataclass(frozen=True)
class Case:
    """A call of the clipped policy gradient and what it gives, by hand.

    Rows have the three entries that count. The first of four is masked, as theirs.
    """

    loss: float
    config: dict[str, Any]
    current: Rows = field(default_factory=lambda: [[HALF, SAME, MORE]])
    advantages: Rows = field(default_factory=lambda: [[1.0, -1.0, 2.0]])
    old: Rows = field(default_factory=lambda: [[-1.0, -1.0, -1.0]])
    generation: Rows | None = None
    reference: Rows | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    no_kl: bool = True
    """Whether the KL penalty has the weight 0, as in most of theirs."""


def kl(weight: float, **config: Any) -> dict[str, Any]:
    return {"reference_policy_kl_penalty": weight, **config}


CLIPPED_KL: dict[str, Any] = {
    "current": [[-1.0, -1.0, -1.0]],
    "advantages": [[0.0, 0.0, 0.0]],
    "reference": [[0.0, -15.0, -30.0]],
    "no_kl": False,
}
FREE: dict[str, Any] = {"kl_input_clamp_value": None, "kl_output_clamp_value": None}
CISPO_TERMS = (-0.8 * HALF, 1.0 * SAME, -2 * 1.2 * MORE)
"""-A clamp(ratio) log p."""

CASES: dict[str, Case] = {
    "PPO": Case(mean(-0.5, 1.0, -2.4), {}, metrics={"probs_ratio": 1.0, "probs_ratio_clamped": 1.0}),
    "REINFORCE": Case(
        mean(0.5, -1.0, 3.0),
        {"disable_ppo_ratio": True, "ratio_clip_min": 0.0, "ratio_clip_max": 0.0},
        current=[[-0.5, -1.0, -1.5]],
        old=[[0.0, 0.0, 0.0]],
    ),
    "on policy by force": Case(
        mean(-1.0, 1.0, -2.0),
        {"force_on_policy_ratio": True},
        metrics={f"probs_ratio{part}{end}": 1.0 for part in ("", "_clamped") for end in ("", "_min", "_max")},
    ),
    "on policy by force, whatever the old policy is": Case(
        mean(-1.0, 1.0, -2.0),
        {"force_on_policy_ratio": True},
        old=[[-10.0, -10.0, -10.0]],
        metrics={"probs_ratio": 1.0},
    ),
    "CISPO": Case(mean(*CISPO_TERMS), {"use_cispo": True}),
    "CISPO, importance weights": Case(
        mean(*(w * term for w, term in zip(WEIGHTS, CISPO_TERMS, strict=True))),
        {"use_cispo": True, **WEIGHTED},
        generation=[GENERATION],
        metrics={"sampling_importance_ratio": mean(*WEIGHTS)},
    ),
    "KL, k3": Case(
        0.1 * mean(exp(-1), 0.0, exp(1) - 2),
        kl(0.1),
        current=[[0.0, -1.0, -2.0]],
        advantages=[[0.0, 0.0, 0.0]],
        old=[[0.0, 0.0, 0.0]],
        reference=[[-1.0, -1.0, -1.0]],
        metrics={"kl_penalty": mean(exp(-1), 0.0, exp(1) - 2)},
        no_kl=False,
    ),
    "KL, k1, no bounds": Case(mean(-1.0, 14.0, 29.0), kl(1.0, reference_policy_kl_type="k1", **FREE), **CLIPPED_KL),
    "KL, k2, no bounds": Case(mean(0.5, 98.0, 420.5), kl(1.0, reference_policy_kl_type="k2", **FREE), **CLIPPED_KL),
    "KL, k3, no bounds": Case(
        mean(exp(1) - 2, 13 + exp(-14), 28 + exp(-29)), kl(1.0, reference_policy_kl_type="k3", **FREE), **CLIPPED_KL
    ),
    "KL, k1, bounds": Case(mean(-1.0, 10.0, 10.0), kl(1.0, reference_policy_kl_type="k1"), **CLIPPED_KL),
    "KL, k2, bounds": Case(mean(0.5, 10.0, 10.0), kl(1.0, reference_policy_kl_type="k2"), **CLIPPED_KL),
    "KL, k3, bounds": Case(mean(exp(1) - 2, 10.0, 10.0), kl(1.0, reference_policy_kl_type="k3"), **CLIPPED_KL),
    "importance weights": Case(
        mean(*(w * term for w, term in zip(WEIGHTS, (-0.5, 1.0, -2.4), strict=True))),
        {"use_on_policy_kl_approximation": True, **WEIGHTED},
        generation=[GENERATION],
        reference=[[-1.0, -1.0, -1.0]],
    ),
    "importance weights, KL": Case(
        mean(
            WEIGHTS[0] * -0.5 + 0.1 * exp(HALF + 0.5) * (2 - log(2) - 1),
            WEIGHTS[1] * 1.0,
            WEIGHTS[2] * -2.4 + 0.1 * exp(MORE + 0.8) * (1 / 1.5 + log(1.5) - 1),
        ),
        kl(0.1, use_on_policy_kl_approximation=True, **WEIGHTED),
        generation=[GENERATION],
        reference=[[-1.0, -1.0, -1.0]],
        no_kl=False,
    ),
    "TIS": Case(
        mean(WEIGHTS[0] * -0.5, 0.8 * 1.0, 0.8 * -2.4),
        truncated("tis", 0.8),
        generation=[GENERATION],
        metrics={"is_oob_ratio": 2 / 3, "sampling_importance_ratio": mean(WEIGHTS[0], 0.8, 0.8)},
    ),
    "TIS, sequences": Case(
        0.8 * MEAN_RATIO * mean(-1.0, 1.0, -2.0),
        {**truncated("tis", 0.8), **GSPO},
        generation=[GENERATION],
        metrics={"is_oob_ratio": 1.0, "sampling_importance_ratio": 0.8},
    ),
    "TIS, outside": Case(
        mean(*(-w / old for w, old in zip((1.0, 2.0, 0.5), (1.0, 3.0, 0.5), strict=True))),
        {**truncated("tis", 2.0), "ratio_clip_min": 1.0, "ratio_clip_max": 9.0},
        current=[[-3.0, -3.0, -3.0]],
        advantages=[[1.0, 1.0, 1.0]],
        old=[[-3.0, log(3) - 3, log(0.5) - 3]],
        generation=[[-3.0, -3.0, -3.0]],
        metrics={"is_oob_ratio": 1 / 3},
    ),
    "TIS, the lower bound is 0": Case(
        -mean(0.1, 1.0, 2.0),
        {**truncated("tis", 2.0), "force_on_policy_ratio": True},
        current=[[log(0.1) - 2, -2.0, log(3) - 2]],
        advantages=[[1.0, 1.0, 1.0]],
        generation=[[-2.0, -2.0, -2.0]],
        metrics={"is_oob_ratio": 1 / 3},
    ),
    "TIS, a lower bound": Case(
        -mean(0.5, 1.0, 2.0),
        {**truncated("tis", 2.0, 0.5), "force_on_policy_ratio": True},
        current=[[log(0.1) - 2, -2.0, log(3) - 2]],
        advantages=[[1.0, 1.0, 1.0]],
        generation=[[-2.0, -2.0, -2.0]],
        metrics={"is_oob_ratio": 2 / 3},
    ),
    "ICE-POP": Case(
        mean(-exp(-0.5), 0.0, -2 * exp(-0.2)),
        truncated("icepop", 5.0, 0.5),
        current=[[-1.0, -1.0, -1.0]],
        generation=[[-0.5, -3.5, -0.8]],
        metrics={"is_oob_ratio": 1 / 3},
    ),
    "sequence masks, inside": Case(
        exp(0.0005) * mean(-1.0, 1.0, -2.0),
        truncated("seq-mask-tis", 1.002, 0.999),
        current=[[-1.0, -1.0, -1.0]],
        generation=[[-1.0005, -1.0005, -1.0005]],
        metrics={"is_oob_ratio": 0.0},
    ),
    "sequence masks, outside": Case(
        0.0,
        truncated("seq-mask-tis", 1.002, 0.999),
        current=[[-1.0, -1.0, -1.0]],
        generation=[[-1.05, -1.0, -1.0]],
        metrics={"is_oob_ratio": 1.0},
    ),
    "sequence masks, -inf": Case(
        0.0,
        truncated("seq-mask-tis", 1.002, 0.999),
        current=[[-1.0, -1.0, -1.0]],
        generation=[[-1.0005, -inf, -1.0005]],
        metrics={"is_oob_ratio": 1.0},
    ),
    "dual clip": Case(
        mean(-0.5, 1.0, 12.0),
        {"ratio_clip_c": 3.0},
        current=[[HALF, SAME, log(10) - 3]],
        advantages=[[1.0, -1.0, -4.0]],
        old=[[-1.0, -1.0, -3.0]],
    ),
    "entropy": Case(
        0.0,
        {},
        current=[[-0.5, -1.0, -1.5]],
        advantages=[[0.0, 0.0, 0.0]],
        old=[[-0.4, -0.9, -1.4]],
        generation=[[-0.6, -1.1, -1.6]],
        metrics={"approx_entropy": exp(0.1) * 1.0},
    ),
    "GSPO": Case(MEAN_RATIO * mean(-1.0, 1.0, -2.0), GSPO),
    "GSPO, two sequences": Case(
        mean(MEAN_RATIO * mean(-1.0, 1.0, -2.0), mean(-1.2, exp(1) * MEAN_RATIO, -2.4)),
        GSPO,
        current=[[HALF, SAME, MORE]] * 2,
        advantages=[[1.0, -1.0, 2.0]] * 2,
        old=[[-1.0] * 3, [-2.0] * 3],
    ),
    "GSPO, importance weights": Case(
        exp(-0.2) * MEAN_RATIO * mean(-1.0, 1.0, -2.0), {**WEIGHTED, **GSPO}, generation=[GENERATION]
    ),
}
