# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference of ``clipped_pg``.

The methods are loops with gradients derived by hand, hand computation and properties.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_losses.clipped_pg import clipped_pg
from dense_losses.importance import exp_or_zero
from lossgate.losses.clipped_pg import ClippedPgOptions

Example = dict[str, Any]
PER_TOKEN = (
    "logprobs",
    "prev_logprobs",
    "generation_logprobs",
    "reference_logprobs",
    "advantages",
    "unfiltered_logprobs",
)
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}
BY_SEQUENCE = {"token_level_loss": False}
NO_KL = {"reference_policy_kl_penalty": 0.0}


def bounded(kind: str, low: float | None, high: float, **rest: Any) -> dict[str, Any]:
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
        **rest,
    }


CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "by sequence": BY_SEQUENCE,
    "asymmetric clip": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.4},
    "dual clip": {"ratio_clip_c": 1.5},
    "dual clip by sequence": {"ratio_clip_c": 1.5, **BY_SEQUENCE},
    "REINFORCE": {"disable_ppo_ratio": True},
    "REINFORCE by sequence": {"disable_ppo_ratio": True, "use_importance_sampling_correction": True, **BY_SEQUENCE},
    "on policy": {"force_on_policy_ratio": True},
    "on policy, corrected": {"force_on_policy_ratio": True, "use_importance_sampling_correction": True, **BY_SEQUENCE},
    "on policy GSPO": {"force_on_policy_ratio": True, "use_importance_sampling_correction": True, **GSPO},
    "CISPO": {"use_cispo": True},
    "CISPO, corrected": {"use_cispo": True, "use_importance_sampling_correction": True},
    "GSPO": GSPO,
    "GSPO, narrow": {"ratio_clip_min": 0.01, "ratio_clip_max": 0.01, **GSPO},
    "GSPO, corrected": {"use_importance_sampling_correction": True, **GSPO},
    "GSPO, tis": bounded("tis", None, 1.1, **GSPO),
    "GSPO, icepop": bounded("icepop", 0.5, 1.3, **GSPO),
    "GSPO, dual clip": {"ratio_clip_c": 1.1, **GSPO},
    "corrected": {"use_importance_sampling_correction": True},
    "tis": bounded("tis", None, 1.1),
    "tis from below": bounded("tis", 0.9, 1.1),
    "icepop": bounded("icepop", 0.7, 1.4),
    "seq-mask-tis": bounded("seq-mask-tis", 0.95, 1.4),
    "seq-mask-tis by sequence": bounded("seq-mask-tis", 0.95, 1.4, **BY_SEQUENCE),
    "k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.5},
    "k2": {"reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 0.5},
    "k3 by sequence": {"reference_policy_kl_penalty": 0.5, **BY_SEQUENCE},
    "clamped KL": {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": 0.5, "kl_output_clamp_value": 0.08},
    "unclamped KL": {"reference_policy_kl_penalty": 0.5, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    "off-policy KL": {"reference_policy_kl_penalty": 0.5, "use_on_policy_kl_approximation": True},
    "off-policy KL, clamped": {
        "reference_policy_kl_penalty": 0.5,
        "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": 0.5,
        "kl_output_clamp_value": 0.08,
    },
    "KL in reward": {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5},
    "VAPO": {"positive_example_nll_weight": 0.3},
    "VAPO, local": {"positive_example_nll_weight": 0.3, "positive_nll_normaliser": "local"},
    "epsilon": {"epsilon": 0.1, "positive_example_nll_weight": 0.3},
    "epsilon, GSPO": {"epsilon": 0.1, **GSPO},
    "epsilon, seq-mask-tis": bounded("seq-mask-tis", 0.95, 1.2, epsilon=2.0, **BY_SEQUENCE),
}

# These stand for all cases in tests of the flow of data, as opposed to tests of formulas.
RICH = [
    "dual clip by sequence",
    "REINFORCE by sequence",
    "on policy, corrected",
    "CISPO, corrected",
    "GSPO, tis",
    "icepop",
    "seq-mask-tis by sequence",
    "k3 by sequence",
    "off-policy KL, clamped",
    "VAPO",
    "VAPO, local",
]

# The sequence of each token. Sequences have 4, 3, 1, 2 and 2 tokens; the last two are interleaved.
# The last but one is not in the sample mask, and the last one has no trained token.
SEQUENCE = [0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 3, 4]
MASK = [1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]
SAMPLED = [1, 1, 1, 0, 1]
TRAINED = [bool(m and SAMPLED[i]) for m, i in zip(MASK, SEQUENCE, strict=True)]


def example(seed: int = 0, filtered: bool = False) -> Example:
    """Makes ratios from 0.5 to 2, on either side of the clip, with advantages of both signs.

    The global counts are those of a larger batch, of which this example is a part.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(len(SEQUENCE), generator=generator, dtype=torch.float64) * (high - low) + low

    logprobs = uniform(-4, -1)
    return {
        "logprobs": logprobs,
        "prev_logprobs": logprobs + uniform(-0.7, 0.7),
        "generation_logprobs": logprobs + uniform(-0.7, 0.7),
        "reference_logprobs": logprobs + uniform(-1, 1),
        "advantages": uniform(-2, 2),
        "unfiltered_logprobs": logprobs + uniform(-0.5, 0) if filtered else None,
        "mask": torch.tensor(MASK, dtype=torch.bool),
        "sequence": torch.tensor(SEQUENCE),
        "sample_mask": torch.tensor(SAMPLED, dtype=torch.bool),
        "valid_tokens": torch.tensor(17),
        "valid_sequences": torch.tensor(9),
        "positive_tokens": torch.tensor(5),
        "rewards": torch.tensor([1.0, -1.0, 0.5, 1.0, 0.0], dtype=torch.float64),
    }


def run(e: Example, options: dict[str, Any], **changed: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped_pg(**{**e, **changed}, options=ClippedPgOptions(**options))


def everything(e: Example, options: dict[str, Any], **changed: Any) -> dict[str, Tensor]:
    """Returns the loss, the metrics, and the gradients with respect to c and, if given, to u."""
    e = {**e, **changed}
    leaves = {
        name: e[name].clone().requires_grad_() for name in ("logprobs", "unfiltered_logprobs") if e[name] is not None
    }
    loss, metrics = run(e, options, **leaves)
    gradients = (
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        if loss.requires_grad
        else ()
    )
    assert not any(value.requires_grad for value in metrics.values())
    return {
        "the loss": loss.detach(),
        **metrics,
        **{f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)},
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-13) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        a, b = value.to(torch.float64), expected[name].to(torch.float64)
        assert torch.equal(a, b) or (a - b).norm() <= tolerance * b.norm(), f"{name}: {a} is not {b}"


def kl_by_hand(p: float, q: float, kind: str) -> float:
    return {"k1": p - q, "k2": (q - p) ** 2 / 2, "k3": math.exp(q - p) - 1 - (q - p)}[kind]


def divide(x: float, n: float) -> float:
    return x / n if n else 0.0


def weights_by_loops(
    o: ClippedPgOptions, p: list[float], g: list[float], members: list[list[int]], eps: float
) -> tuple[list[float], list[float]]:
    """Computes w and whether it is out of bounds, for tokens or sequences as the options say."""
    kind, low, high = (
        o.truncated_importance_sampling_type,
        o.truncated_importance_sampling_ratio_min or 0.0,
        o.truncated_importance_sampling_ratio,
    )
    if o.sequence_level_importance_ratios:
        units = [math.exp(sum(p[t] - g[t] for t in own)) for own in members]
    else:
        units = [math.exp(p[t] - g[t]) for t in range(len(p))]
    outside = [0.0 for _ in units]
    if kind in ("tis", "icepop"):
        outside = [float(not low <= w <= high) for w in units]
        units = [
            min(max(w, low), high) if kind == "tis" else w * (1 - out) for w, out in zip(units, outside, strict=True)
        ]
    elif kind == "seq-mask-tis":
        geometric = [math.exp(divide(sum(p[t] - g[t] for t in own), len(own) + eps)) for own in members]
        outside = [float(not low <= x <= high) for x in geometric]
        units = [w * (1 - outside[SEQUENCE[t]]) for t, w in enumerate(units)]
    return units, outside


def ratios_by_hand(o: ClippedPgOptions, c: float, log_ratio: float) -> tuple[float, float]:
    """Computes rho and clamp(rho) of a token."""
    if o.force_on_policy_ratio:
        return 1.0, 1.0
    if o.disable_ppo_ratio:
        return c, c
    ratio = math.exp(log_ratio)
    return ratio, min(max(ratio, 1 - o.ratio_clip_min), 1 + o.ratio_clip_max)


def surrogate_by_hand(o: ClippedPgOptions, ratio: float, clamped: float, c: float, a: float) -> tuple[float, float]:
    """Computes l of a token, and its slope in c - p (in c for CISPO and REINFORCE)."""
    if o.use_cispo:
        return -a * clamped * c, -a * clamped
    value = max(-a * ratio, -a * clamped)
    is_clipped = value != -a * ratio
    slope = 0.0 if is_clipped else -a if o.disable_ppo_ratio else -a * ratio
    if o.ratio_clip_c is not None and a < 0 and value > -a * o.ratio_clip_c:
        return -a * o.ratio_clip_c, 0.0
    return value, slope


def penalty_by_hand(o: ClippedPgOptions, u: float, q: float, g: float) -> tuple[float, float]:
    """Computes kl(u, q) of a token with its clamps, and its slope in u."""
    d, v = q - u, math.exp(u - g) if o.use_on_policy_kl_approximation else 1.0
    bound = math.inf if o.kl_input_clamp_value is None else o.kl_input_clamp_value
    top = math.inf if o.kl_output_clamp_value is None else o.kl_output_clamp_value
    k = v * kl_by_hand(0.0, min(max(d, -bound), bound), o.reference_policy_kl_type)
    slope = v * {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[o.reference_policy_kl_type] + k
    return min(max(k, -top), top), slope if abs(d) < bound and abs(k) < top else 0.0


def loops(e: Example, options: dict[str, Any]) -> dict[str, Tensor]:
    """Computes everything token by token in Python floats, with gradients derived by hand."""
    o, eps = ClippedPgOptions(**options), options.get("epsilon", 0.0)
    c, p, g, q, a = (e[name].tolist() for name in PER_TOKEN[:5])
    u = c if e["unfiltered_logprobs"] is None else e["unfiltered_logprobs"].tolist()
    p = c if o.force_on_policy_ratio else p
    tokens, sequences = range(len(c)), range(len(SAMPLED))
    members = [[t for t in tokens if TRAINED[t] and SEQUENCE[t] == i] for i in sequences]
    n_tokens, n_sequences = int(e["valid_tokens"]) + eps, int(e["valid_sequences"]) + eps
    share = [  # the weight of each token in the loss
        1 / n_tokens if o.token_level_loss else divide(1.0, (len(members[SEQUENCE[t]]) + eps) * n_sequences)
        for t in tokens
    ]
    units, outside = weights_by_loops(o, p, g, members, eps)
    weight = [units[SEQUENCE[t]] if o.sequence_level_importance_ratios else units[t] for t in tokens]
    used = weight if o.use_importance_sampling_correction else [1.0 for _ in tokens]

    loss, of_c, of_u, kl, nll = 0.0, [0.0] * len(c), [0.0] * len(c), 0.0, 0.0
    ratios, clampeds = [], []
    for t in (t for t in tokens if TRAINED[t]):
        mates = members[SEQUENCE[t]]
        gspo = o.sequence_level_importance_ratios and not o.force_on_policy_ratio and not o.disable_ppo_ratio
        log_ratio = sum(c[s] - p[s] for s in mates) / (len(mates) + eps) if gspo else c[t] - p[t]
        ratio, clamped = ratios_by_hand(o, c[t], log_ratio)
        ratios.append(ratio)
        clampeds.append(clamped)
        value, slope = surrogate_by_hand(o, ratio, clamped, c[t], a[t])
        loss += share[t] * used[t] * value
        for s in mates if gspo else [t]:
            of_c[s] += share[t] * used[t] * slope / (len(mates) + eps if gspo else 1)

        if o.reference_policy_kl_penalty and not o.use_kl_in_reward:
            penalty, slope = penalty_by_hand(o, u[t], q[t], g[t])
            kl += share[t] * penalty
            of_this = of_c if e["unfiltered_logprobs"] is None else of_u
            of_this[t] += share[t] * o.reference_policy_kl_penalty * slope

    mu, positive = o.positive_example_nll_weight, [t for t in tokens if TRAINED[t] and e["rewards"][SEQUENCE[t]] > 0]
    if mu:
        n = eps + (len(positive) if o.positive_nll_normaliser == "local" else int(e["positive_tokens"]))
        nll = -sum(c[t] for t in positive) / n
        for t in positive:
            of_c[t] -= mu / n

    mean = lambda f: sum(f(t) for t in tokens if TRAINED[t]) / n_tokens  # noqa: E731
    mean_of_sequences = lambda x: sum(x[i] for i in sequences if SAMPLED[i]) / n_sequences  # noqa: E731

    def js(t: int) -> float:
        m = math.log(0.5 * math.exp(p[t]) + 0.5 * math.exp(g[t]))
        return 0.5 * kl_by_hand(p[t], m, "k3") + 0.5 * kl_by_hand(g[t], m, "k3")

    total = loss + kl * (0 if o.use_kl_in_reward else o.reference_policy_kl_penalty) + mu * nll
    result: dict[str, Any] = {
        "the loss": total,
        "loss": total,
        "kl_penalty": kl,
        "positive_nll_loss": nll,
        "num_valid_samples": sum(SAMPLED),
        "approx_entropy": -mean(lambda t: math.exp(c[t] - g[t]) * c[t]),
        "probs_ratio": sum(ratios) / n_tokens,
        "probs_ratio_min": min(ratios),
        "probs_ratio_max": max(ratios),
        "probs_ratio_clamped": sum(clampeds) / n_tokens,
        "probs_ratio_clamped_min": min(clampeds),
        "probs_ratio_clamped_max": max(clampeds),
        "token_mult_prob_error": mean(lambda t: math.exp(abs(g[t] - p[t]))),
        "gen_kl_error": mean(lambda t: kl_by_hand(g[t], p[t], o.reference_policy_kl_type)),
        "policy_kl_error": mean(lambda t: kl_by_hand(p[t], g[t], o.reference_policy_kl_type)),
        "js_divergence_error": mean(js),
        "sampling_importance_ratio": mean_of_sequences(units)
        if o.sequence_level_importance_ratios
        else mean(lambda t: units[t]),
    }
    if o.truncated_importance_sampling_type == "seq-mask-tis":
        result["is_oob_ratio"] = mean_of_sequences(outside)
    elif o.truncated_importance_sampling_type is not None:
        result["is_oob_ratio"] = mean(lambda t: outside[SEQUENCE[t] if o.sequence_level_importance_ratios else t])
    result["gradient of logprobs"] = of_c
    if e["unfiltered_logprobs"] is not None:
        result["gradient of unfiltered_logprobs"] = of_u
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in result.items()}


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_by_loops(case: str, filtered: bool) -> None:
    e = example(2 * list(CASES).index(case) + filtered, filtered)
    assert_same(everything(e, CASES[case]), loops(e, CASES[case]), tolerance=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_same_without_metrics(case: str) -> None:
    e = example(list(CASES).index(case))
    whole, metrics = run(e, CASES[case])
    loss, nothing = run(e, CASES[case], with_metrics=False)
    assert torch.equal(loss, whole)
    assert "loss" in metrics
    assert nothing == {}


# Hand computation: N is the number of tokens, one or a few. There is no KL unless a test sets it.


def tiny(
    ratio: list[float] | None = None,
    a: list[float] | None = None,
    weight: list[float] | None = None,
    sequence: list[int] | None = None,
    c: float = -2.0,
) -> Example:
    """Makes tokens of log-prob ``c`` with these ratios c/p, advantages and weights p/g.

    Each token is a sequence of its own, unless ``sequence`` is given.
    """
    n = len(ratio or a or weight or [0])
    ratios, weights, advantages = (torch.tensor(x or [1.0] * n, dtype=torch.float64) for x in (ratio, weight, a))
    numbers = torch.tensor(sequence or list(range(n)))
    logprobs = torch.full((n,), c, dtype=torch.float64)
    return {
        "logprobs": logprobs,
        "prev_logprobs": logprobs - ratios.log(),
        "generation_logprobs": logprobs - ratios.log() - weights.log(),
        "reference_logprobs": logprobs - 1,
        "advantages": advantages,
        "unfiltered_logprobs": None,
        "mask": torch.ones(n, dtype=torch.bool),
        "sequence": numbers,
        "sample_mask": torch.ones(int(numbers.max()) + 1, dtype=torch.bool),
        "valid_tokens": torch.tensor(n),
        "valid_sequences": numbers.max() + 1,
        "positive_tokens": torch.tensor(n),
        "rewards": torch.ones(int(numbers.max()) + 1, dtype=torch.float64),
    }


DUAL, CISPO, REINFORCE = {"ratio_clip_c": 3.0}, {"use_cispo": True}, {"disable_ppo_ratio": True}
WIDE = {"ratio_clip_min": 0.5, "ratio_clip_max": 1.0}


@pytest.mark.parametrize(
    ("options", "ratio", "a", "loss", "slope"),
    [
        ({}, 1.1, 1.0, -1.1, -1.1),
        ({}, 1.1, -1.0, 1.1, 1.1),
        ({}, 0.9, 1.0, -0.9, -0.9),
        ({}, 0.9, -1.0, 0.9, 0.9),
        ({}, 1.5, 1.0, -1.2, 0),  # above, and better than before: clipped
        ({}, 1.5, -1.0, 1.5, 1.5),  # above, and worse: not clipped
        ({}, 0.5, 1.0, -0.5, -0.5),  # below, and worse: not clipped
        ({}, 0.5, -1.0, 0.8, 0),  # below, and better: clipped
        (WIDE, 1.5, 1.0, -1.5, -1.5),
        (WIDE, 2.5, 1.0, -2.0, 0),
        (WIDE, 0.6, -1.0, 0.6, 0.6),
        (WIDE, 0.4, -1.0, 0.5, 0),
        (DUAL, 5.0, -1.0, 3.0, 0),
        (DUAL, 2.0, -1.0, 2.0, 2.0),
        (DUAL, 5.0, -2.0, 6.0, 0),
        (DUAL, 5.0, 1.0, -1.2, 0),
        (DUAL, 0.5, 1.0, -0.5, -0.5),
        (CISPO, 1.1, 1.0, 2.2, -1.1),
        (CISPO, 1.5, 1.0, 2.4, -1.2),
        (CISPO, 1.5, -1.0, -2.4, 1.2),
        (CISPO, 0.5, 1.0, 1.6, -0.8),
        (CISPO, 0.5, -1.0, -1.6, 0.8),
        (REINFORCE, 1.5, 1.0, 2.0, -1.0),
        (REINFORCE, 0.5, -1.0, -2.0, 1.0),
        ({"force_on_policy_ratio": True}, 1.5, 1.0, -1.0, -1.0),
        ({"force_on_policy_ratio": True}, 0.5, -1.0, 1.0, 1.0),
        ({}, 1.5, 0.0, 0, 0),
    ],
)
def test_clips_by_hand(options: dict[str, Any], ratio: float, a: float, loss: float, slope: float) -> None:
    found = everything(tiny([ratio], [a]), {**NO_KL, **options})
    assert float(found["the loss"]) == pytest.approx(loss, rel=1e-14)
    assert float(found["gradient of logprobs"]) == pytest.approx(slope, rel=1e-14)


@pytest.mark.parametrize(
    ("options", "used", "metric", "outside"),
    [
        ({}, [1, 1, 1], 5.5 / 3, None),  # w has no effect on the loss, but is a metric
        ({"use_importance_sampling_correction": True}, [0.5, 1, 4], 5.5 / 3, None),
        (bounded("tis", None, 2.0), [0.5, 1, 2], 3.5 / 3, 1 / 3),
        (bounded("tis", 0.75, 2.0), [0.75, 1, 2], 3.75 / 3, 2 / 3),
        (bounded("icepop", 0.75, 2.0), [0, 1, 0], 1 / 3, 2 / 3),
        (bounded("icepop", 0.25, 2.0), [0.5, 1, 0], 1.5 / 3, 1 / 3),
        (bounded("seq-mask-tis", 0.7, 2.0), [0.5, 1, 0], 1.5 / 3, 1 / 2),
        (bounded("seq-mask-tis", 0.6, 5.0), [0.5, 1, 4], 5.5 / 3, 0),
        (bounded("seq-mask-tis", 0.75, 5.0), [0, 0, 4], 4 / 3, 1 / 2),
        ({"use_importance_sampling_correction": True, **GSPO}, [0.5, 0.5, 4], 4.5 / 2, None),
        (bounded("tis", None, 2.0, **GSPO), [0.5, 0.5, 2], 2.5 / 2, 1 / 3),
        (bounded("icepop", 0.75, 5.0, **GSPO), [0, 0, 4], 4 / 2, 2 / 3),
    ],
)
def test_importance_weights_by_hand(
    options: dict[str, Any], used: list[float], metric: float, outside: float | None
) -> None:
    """One sequence has weights of 1/2 and 1, whose geometric mean is 0.707; another has one of 4.

    The slope of a token is -w A times its share.
    """
    found = everything(tiny(weight=[0.5, 1.0, 4.0], sequence=[0, 0, 1]), {**NO_KL, **options})
    share = torch.tensor(
        [1 / 4, 1 / 4, 1 / 2] if options.get("token_level_loss") is False else [1 / 3] * 3, dtype=torch.float64
    )
    slopes = -torch.tensor(used, dtype=torch.float64) * share
    if options.get("sequence_level_importance_ratios"):
        assert float(found["the loss"]) == pytest.approx(float(slopes.sum()), rel=1e-14)
    assert (found["gradient of logprobs"] - slopes).abs().max() < 1e-14
    assert float(found["sampling_importance_ratio"]) == pytest.approx(metric, rel=1e-14)
    assert (
        (float(found["is_oob_ratio"]) == pytest.approx(outside, rel=1e-14))
        if outside is not None
        else "is_oob_ratio" not in found
    )


@pytest.mark.parametrize(
    ("options", "penalty", "slope"),
    [
        ({}, 1 / math.e, 1.0),  # d = -1: k3 = exp(-1); with the score term the slope is u - q
        ({"reference_policy_kl_type": "k1"}, 1.0, 2.0),
        ({"reference_policy_kl_type": "k2"}, 0.5, 1.5),
        ({"use_on_policy_kl_approximation": True}, 2 / math.e, 2.0),  # exp(u - g) = 2
        ({"kl_input_clamp_value": 0.5}, math.exp(-0.5) - 0.5, 0.0),
        ({"kl_output_clamp_value": 0.25}, 0.25, 0.0),
        ({"reference_policy_kl_penalty": 0.0}, 0.0, 0.0),
        ({"use_kl_in_reward": True}, 0.0, 0.0),
    ],
)
def test_penalties_by_hand(options: dict[str, Any], penalty: float, slope: float) -> None:
    options = {"reference_policy_kl_penalty": 3.0, **options}
    found = everything(tiny(weight=[2.0], a=[0.0]), options)
    assert float(found["kl_penalty"]) == pytest.approx(penalty, rel=1e-14)
    assert float(found["the loss"]) == pytest.approx(3 * penalty, rel=1e-14)
    assert float(found["gradient of logprobs"]) == pytest.approx(3 * slope, rel=1e-14)


def test_metrics_by_hand() -> None:
    """The first of two tokens has p = 1/2 and g = 1/6, hence m = 1/3."""
    e = tiny(ratio=[2.0, 0.25], weight=[3.0, 1.0], c=0.0)
    e["logprobs"], e["prev_logprobs"] = (torch.tensor(x, dtype=torch.float64).log() for x in ([1.0, 0.25], [0.5, 1.0]))
    e["generation_logprobs"] = torch.tensor([1 / 6, 1.0], dtype=torch.float64).log()
    found = run(e, NO_KL)[1]
    expected = {
        "probs_ratio": 1.125,
        "probs_ratio_min": 0.25,
        "probs_ratio_max": 2.0,
        "probs_ratio_clamped": 1.0,
        "probs_ratio_clamped_min": 0.8,
        "probs_ratio_clamped_max": 1.2,
        "token_mult_prob_error": (3 + 1) / 2,
        "gen_kl_error": (3 - 1 - math.log(3)) / 2,
        "policy_kl_error": (1 / 3 - 1 + math.log(3)) / 2,
        "js_divergence_error": (2 / 3 - math.log(2 / 3) - math.log(2)) / 4,
        "approx_entropy": (6 * 0 + 0.25 * math.log(4)) / 2,
        "sampling_importance_ratio": (3 + 1) / 2,
        "num_valid_samples": 2,
        "positive_nll_loss": 0,
        "kl_penalty": 0,
        "loss": -(1.2 + 0.25) / 2,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-13), name


def test_positive_examples_by_hand() -> None:
    """All log-probs are -2. Two of the three tokens here have a positive reward.

    The whole batch has eight such tokens.
    """
    e = {
        **tiny(a=[0.0, 0.0, 0.0]),
        "rewards": torch.tensor([1.0, 0.0, 0.1], dtype=torch.float64),
        "positive_tokens": torch.tensor(8),
    }
    shared = everything(e, {**NO_KL, "positive_example_nll_weight": 0.5})
    assert shared["positive_nll_loss"] == 0.5
    assert shared["the loss"] == 0.25
    assert shared["gradient of logprobs"].tolist() == [-0.5 / 8, 0, -0.5 / 8]
    local = everything(e, {**NO_KL, "positive_example_nll_weight": 0.5, "positive_nll_normaliser": "local"})
    assert local["positive_nll_loss"] == 2.0
    assert local["the loss"] == 1.0


def test_reductions_by_hand() -> None:
    """Two tokens of one sequence have the loss -1, and one token of another has -2.

    The mean is -(1 + 1 + 2) / 3 over tokens, -(1 + 2) / 2 over sequences, and -(1 + 2) / 4 in a
    batch of 4 sequences.
    """
    e = tiny(a=[1.0, 1.0, 2.0], sequence=[0, 0, 1])
    assert run(e, NO_KL)[0] == pytest.approx(-4 / 3, rel=1e-15)
    assert run(e, {**NO_KL, **BY_SEQUENCE})[0] == -1.5
    assert run(e, {**NO_KL, **BY_SEQUENCE}, valid_sequences=torch.tensor(4))[0] == -0.75
    assert run(e, {**NO_KL, "epsilon": 1.0})[0] == -1.0
    assert run(e, {**NO_KL, **BY_SEQUENCE, "epsilon": 1.0})[0] == pytest.approx(-(2 / 3 + 2 / 2) / 3, rel=1e-15)


def test_a_small_epsilon_is_not_lost() -> None:
    """An int64 count plus 1e-8 would be a float32, in which 1e-8 vanishes."""
    e = example()
    plain, with_epsilon = (run(e, {"epsilon": x})[0] for x in (0.0, 1e-8))
    assert float(plain / with_epsilon - 1) == pytest.approx(1e-8 / 17, rel=1e-4)


# Identities.


def ppo_gradient(e: Example, options: dict[str, Any]) -> Tensor:
    return everything(e, {**NO_KL, **options})["gradient of logprobs"]


@pytest.mark.parametrize("options", [{}, BY_SEQUENCE, {"ratio_clip_c": 2.0}, {"force_on_policy_ratio": True}])
@pytest.mark.parametrize("seed", range(2))
def test_on_policy_the_gradient_is_that_of_reinforce(seed: int, options: dict[str, Any]) -> None:
    e = example(seed)
    e["prev_logprobs"] = e["logprobs"]
    reduction = {"token_level_loss": options.get("token_level_loss", True)}
    assert (ppo_gradient(e, options) - ppo_gradient(e, {**reduction, **REINFORCE})).abs().max() < 1e-16


@pytest.mark.parametrize("options", [{}, BY_SEQUENCE])
@pytest.mark.parametrize("seed", range(2))
def test_forced_on_policy_the_loss_is_minus_the_mean_advantage(seed: int, options: dict[str, Any]) -> None:
    """The ratio is 1 and not clipped, and its gradient is that of the log-prob.

    The policy before the update has no effect.
    """
    e = example(seed)
    found = everything(e, {**NO_KL, "force_on_policy_ratio": True, **options})
    trained = torch.tensor(TRAINED)
    counts = torch.bincount(e["sequence"][trained], minlength=5).clamp(min=1).to(torch.float64)
    share = 1 / (9 * counts[e["sequence"]]) if options else torch.full((12,), 1 / 17, dtype=torch.float64)
    expected = torch.where(trained, -e["advantages"] * share, 0)
    assert float(found["the loss"]) == pytest.approx(float(expected.sum()), rel=1e-13)
    assert (found["gradient of logprobs"] - expected).norm() <= 1e-14 * expected.norm()
    assert_same(
        everything({**e, "prev_logprobs": e["prev_logprobs"] + 5}, {**NO_KL, "force_on_policy_ratio": True, **options}),
        found,
    )


@pytest.mark.parametrize("seed", range(2))
def test_gspo_of_one_token_per_sequence_equals_the_token_ratio(seed: int) -> None:
    e = {**example(seed), "sequence": torch.arange(12), "sample_mask": torch.arange(12) % 5 != 4, "rewards": None}
    for options in ({}, {"ratio_clip_c": 1.5}, {"use_importance_sampling_correction": True}):
        single, tokens = (everything(e, {**way, **options}) for way in (GSPO, BY_SEQUENCE))
        for name in ("the loss", "gradient of logprobs", "probs_ratio", "probs_ratio_max"):
            assert (single[name] - tokens[name]).norm() <= 1e-14 * tokens[name].norm()


@pytest.mark.parametrize("seed", range(2))
def test_a_permutation_within_a_sequence_does_not_change_gspo(seed: int) -> None:
    e = example(seed)
    differences = e["logprobs"] - e["prev_logprobs"]
    differences[[0, 1, 3]] = differences[[3, 0, 1]]
    permuted = {**e, "prev_logprobs": e["logprobs"] - differences}
    assert float(run(permuted, GSPO)[0]) == pytest.approx(float(run(e, GSPO)[0]), rel=1e-13)


@pytest.mark.parametrize("seed", range(2))
def test_cispo_is_reinforce_with_a_constant_clipped_ratio(seed: int) -> None:
    e = example(seed)
    ratio = (e["logprobs"] - e["prev_logprobs"]).exp().clamp(0.8, 1.2)
    reweighted = {**e, "advantages": e["advantages"] * ratio}
    found, expected = everything(e, {**NO_KL, **CISPO}), everything(reweighted, {**NO_KL, **REINFORCE})
    for name in ("the loss", "gradient of logprobs"):
        assert (found[name] - expected[name]).norm() <= 1e-14 * expected[name].norm()


@pytest.mark.parametrize("seed", range(2))
def test_without_a_clip_negated_advantages_negate_the_loss(seed: int) -> None:
    e = example(seed)
    for options in ({"ratio_clip_min": 1.0, "ratio_clip_max": 9.0}, REINFORCE, CISPO, {"force_on_policy_ratio": True}):
        there, back = (run({**e, "advantages": sign * e["advantages"]}, {**NO_KL, **options})[0] for sign in (1, -1))
        assert float(there) == pytest.approx(-float(back), rel=1e-14)


@pytest.mark.parametrize("case", RICH)
def test_zero_advantages_give_zero_policy_loss(case: str) -> None:
    e = example()
    found = everything(
        {**e, "advantages": torch.zeros(12, dtype=torch.float64)},
        {**CASES[case], **NO_KL, "positive_example_nll_weight": 0.0},
    )
    assert found["the loss"] == 0
    assert not found["gradient of logprobs"].any()


# Filtered tokens, and overflow.


@pytest.mark.parametrize("case", RICH)
def test_a_token_filtered_out_takes_no_part(case: str) -> None:
    """A token whose c and p are -inf counts as masked, except in the KL penalty, which reads u."""
    e = example(filtered=True)
    of_both = {
        **e,
        **{name: torch.where(torch.arange(12) == 5, -math.inf, e[name]) for name in ("logprobs", "prev_logprobs")},
    }
    masked = {**e, "mask": e["mask"] & (torch.arange(12) != 5)}
    options = {**CASES[case], **NO_KL}
    assert_same(everything(of_both, options), everything(masked, options), tolerance=1e-14)
    with_kl = everything(of_both, {**CASES[case], "reference_policy_kl_penalty": 0.5})
    assert all(value.isfinite().all() for value in with_kl.values())
    assert float(with_kl["kl_penalty"]) == pytest.approx(
        float(everything(e, {**CASES[case], "reference_policy_kl_penalty": 0.5})["kl_penalty"])
    )
    of_none = everything({**of_both, "unfiltered_logprobs": None}, CASES[case])
    assert all(value.isfinite().all() for value in of_none.values())
    assert_same(of_none, everything({**masked, "unfiltered_logprobs": None}, CASES[case]), tolerance=1e-14)


@pytest.mark.parametrize("name", ["logprobs", "prev_logprobs"])
def test_a_token_filtered_out_of_one_policy_has_no_ratio(name: str) -> None:
    """The policy loss counts it as masked. The metrics of p and g do so only if p is filtered."""
    e = {**example(), "unfiltered_logprobs": example()["logprobs"]}
    options = {"use_importance_sampling_correction": True, **NO_KL}
    filtered = everything({**e, name: torch.where(torch.arange(12) == 5, -math.inf, e[name])}, options)
    masked, unfiltered = everything({**e, "mask": e["mask"] & (torch.arange(12) != 5)}, options), everything(e, options)
    for of_ratios in ("the loss", "probs_ratio", "probs_ratio_min", "approx_entropy", "gradient of logprobs"):
        assert (filtered[of_ratios] - masked[of_ratios]).norm() <= 1e-15
    for of_p in ("gen_kl_error", "sampling_importance_ratio", "token_mult_prob_error"):
        assert filtered[of_p] == (unfiltered if name == "logprobs" else masked)[of_p]


def test_reinforce_without_weights_does_not_read_the_previous_policy() -> None:
    e = example()
    filtered = {**e, "prev_logprobs": torch.where(torch.arange(12) == 5, -math.inf, e["prev_logprobs"])}
    assert_same({"": run(filtered, REINFORCE)[0]}, {"": run(e, REINFORCE)[0]})
    corrected = {**REINFORCE, **NO_KL, "use_importance_sampling_correction": True}
    assert_same(
        {"": run(filtered, corrected)[0]}, {"": run({**e, "mask": e["mask"] & (torch.arange(12) != 5)}, corrected)[0]}
    )


def test_a_nan_at_a_trained_token_is_not_hidden() -> None:
    e = example()
    broken = {**e, "logprobs": torch.where(torch.arange(12) == 5, math.nan, e["logprobs"])}
    assert run(broken, {})[0].isnan()


def test_weights_that_overflow_are_zero_with_zero_gradient() -> None:
    x = torch.tensor([0.0, 1000.0, math.inf, math.nan, -math.inf], dtype=torch.float64, requires_grad=True)
    exp_or_zero(x).sum().backward()
    assert exp_or_zero(x).tolist() == [1, 0, 0, 0, 0]
    assert x.grad is not None
    assert x.grad.tolist() == [1, 0, 0, 0, 0]
    e = {**tiny(a=[0.0]), "generation_logprobs": torch.tensor([-1000.0], dtype=torch.float64)}
    found = everything(e, {"use_on_policy_kl_approximation": True, "use_importance_sampling_correction": True})
    assert found["the loss"] == 0
    assert found["sampling_importance_ratio"] == 0
    assert found["gradient of logprobs"] == 0


@pytest.mark.parametrize("options", [BY_SEQUENCE, GSPO])
def test_importance_weights_are_constants(options: dict[str, Any]) -> None:
    """No gradient flows to the log-probs that the weights are computed from."""
    e = example()
    e["prev_logprobs"].requires_grad_()
    loss = run(e, {**NO_KL, **REINFORCE, "use_importance_sampling_correction": True, **options})[0]
    assert not loss.requires_grad


# Options.

TIS = bounded("tis", None, 1.1)


def test_the_defaults_are_those_of_the_original() -> None:
    assert ClippedPgOptions() == ClippedPgOptions(
        ratio_clip_min=0.2,
        ratio_clip_max=0.2,
        reference_policy_kl_penalty=0.01,
        kl_input_clamp_value=20.0,
        kl_output_clamp_value=10.0,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_level_importance_ratios": True}, "token_level_loss=True"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "disable_ppo_ratio=True"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio=True"),
        ({"use_cispo": True, **GSPO}, "sequence_level_importance_ratios=True"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c=3.0"),
        ({"use_cispo": True, **BY_SEQUENCE}, "token_level_loss=False"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c=1.0"),
        ({"ratio_clip_min": -0.1}, "ratio_clip_min=-0.1"),
        ({"ratio_clip_max": -0.1}, "ratio_clip_max=-0.1"),
        ({"kl_input_clamp_value": 0.0}, "kl_input_clamp_value=0.0"),
        ({"kl_output_clamp_value": -1.0}, "kl_output_clamp_value=-1.0"),
        ({"positive_example_nll_weight": -1.0}, "positive_example_nll_weight=-1.0"),
        ({"epsilon": -1e-8}, "epsilon=-1e-08"),
        ({"truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_ratio=2.0"),
        ({"truncated_importance_sampling_ratio_min": 0.5}, "truncated_importance_sampling_ratio_min=0.5"),
        ({**TIS, "use_importance_sampling_correction": False}, "use_importance_sampling_correction=False"),
        ({**TIS, "truncated_importance_sampling_ratio": None}, "truncated_importance_sampling_ratio=None"),
        (bounded("tis", None, 0.0), "truncated_importance_sampling_ratio=0.0"),
        (bounded("tis", 3.0, 2.0), "truncated_importance_sampling_ratio_min=3.0"),
        (bounded("icepop", None, 2.0), "truncated_importance_sampling_ratio_min=None"),
        (bounded("seq-mask-tis", None, 2.0), "truncated_importance_sampling_ratio_min=None"),
        (bounded("seq-mask-tis", 0.5, 2.0, **GSPO), "sequence_level_importance_ratios=True"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}: expected "):
        ClippedPgOptions(**options)


@pytest.mark.parametrize(
    "name", ["reference_policy_kl_type", "positive_nll_normaliser", "truncated_importance_sampling_type"]
)
def test_unknown_names_are_rejected(name: str) -> None:
    """Bypasses the type checks of the test run, which would raise first."""
    options = ClippedPgOptions()
    object.__setattr__(options, name, "k4")
    with pytest.raises(ValueError, match=f"^{name}='k4': expected one of"):
        options.__post_init__()


def test_missing_inputs_are_rejected() -> None:
    e = example()
    with pytest.raises(ValueError, match=r"rewards=None: expected .*; pass one reward for each sequence"):
        run(e, {"positive_example_nll_weight": 0.1}, rewards=None)
    with pytest.raises(ValueError, match=r"positive_tokens=None: expected .*; pass the number of tokens"):
        run(e, {"positive_example_nll_weight": 0.1}, positive_tokens=None)
    run(e, {"positive_example_nll_weight": 0.1, "positive_nll_normaliser": "local"}, positive_tokens=None)
    run(e, {}, rewards=None, positive_tokens=None)
