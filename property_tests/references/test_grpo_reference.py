# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference of ``grpo``.

The methods are plain Python token by token with derivatives by hand, hand computation
and properties.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense_losses.grpo import grpo, kl_estimates
from dense_losses.rho import importance_weights
from lossgate.losses.grpo import GrpoOptions, RhoOptions

nan, inf = float("nan"), float("inf")
Example = dict[str, Any]
PER_TOKEN = ("logprobs", "old_logprobs", "reference_logprobs", "vllm_logprobs", "advantages")
METRICS = {
    *("kl0", "kl1", "kl2", "kl3", "kl_avg", "policy_avg", "total_avg", "clipfrac", "ratio_mean", "ratio_square_mean"),
    *(
        "rho_mean",
        "rho_weight",
        "rho_clipfrac",
        "rho_drop_frac",
        "rho_drop_low_frac",
        "rho_drop_high_frac",
        "rho_min",
        "rho_max",
    ),
}
EVERY_KIND = [
    GrpoOptions(),
    GrpoOptions(loss_fn="cispo"),
    GrpoOptions(use_rho_correction=False, kl_estimator=0, loss_denominator=0.25, loss_scale=4),
    GrpoOptions(
        loss_fn="cispo", kl_estimator=1, rho_mask_lower_bound=0.7, rho_mask_upper_bound=1.5, loss_denominator=50.0
    ),
    GrpoOptions(kl_estimator=3, rho_clamp_lower_bound=0.8, rho_clamp_upper_bound=1.2, beta=0.7),
    GrpoOptions(
        rho_mask_sequence_level=True,
        rho_mask_lower_bound=0.95,
        rho_mask_upper_bound=1.05,
        rho_clamp_upper_bound=1.1,
        clip_lower=0.05,
        clip_higher=0.05,
    ),
    GrpoOptions(
        loss_fn="cispo",
        rho_mask_tv_divergence=True,
        rho_mask_lower_bound=0.29,
        rho_mask_upper_bound=0.31,
        rho_clamp_upper_bound=1.5,
        kl_estimator=3,
    ),
    GrpoOptions(
        rho_mask_tv_divergence=True, rho_mask_sequence_level=True, rho_mask_upper_bound=0.3, rho_clamp_upper_bound=1.02
    ),
]
each_kind = pytest.mark.parametrize("options", EVERY_KIND, ids=range(len(EVERY_KIND)))


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def example(seed: int = 0, lengths: tuple[int, ...] = (6, 1, 8, 5), nan_share: float = 0.1) -> Example:
    """Makes sequences with a third of the tokens masked and some log-probs of vLLM NaN.

    The log-probs of the policies are about half a nat apart.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(scale: float) -> Tensor:
        return torch.randn(tokens, generator=generator, dtype=torch.float64) * scale

    logprobs = -normal(2.0).abs() - 0.1
    old = logprobs + normal(0.4)
    vllm = torch.where(torch.rand(tokens, generator=generator) < nan_share, nan, old + normal(0.4))
    mask = torch.rand(tokens, generator=generator) < 0.67
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "reference_logprobs": logprobs + normal(0.6),
        "vllm_logprobs": vllm,
        "advantages": normal(1.0),
        "mask": mask,
        "valid_tokens": mask.sum(),
        "sequence": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        "sequences": len(lengths),
    }


def long_example(seed: int) -> Example:
    """Makes an example that covers every branch of the options above."""
    return example(seed, lengths=(30, 1, 17, 60, 4, 6, 3))


def tokens_of(
    r: float, rho: float | list[float], advantages: float | list[float] = 1.0, logprob: float = -2.0, d: float = 0.0
) -> Example:
    """Makes one sequence of trained tokens with ratio r and d = log p - log p_ref.

    Each token has its own rho and its own advantage.
    """
    rhos = rho if isinstance(rho, list) else [rho]
    each = advantages if isinstance(advantages, list) else [advantages] * len(rhos)
    logprobs = torch.full((len(rhos),), logprob, dtype=torch.float64)
    old = logprobs - math.log(r)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "reference_logprobs": logprobs - d,
        "vllm_logprobs": old - numbers(*rhos).log(),
        "advantages": numbers(*each),
        "mask": torch.ones(len(rhos), dtype=torch.bool),
        "valid_tokens": torch.tensor(len(rhos)),
        "sequence": torch.zeros(len(rhos), dtype=torch.long),
        "sequences": 1,
    }


def joined(*parts: Example) -> Example:
    """Packs the sequences of all parts, one after the other."""
    starts = [sum(p["sequences"] for p in parts[:i]) for i in range(len(parts) + 1)]
    return {
        **{name: torch.cat([p[name] for p in parts]) for name in (*PER_TOKEN, "mask")},
        "sequence": torch.cat([p["sequence"] + start for p, start in zip(parts, starts, strict=False)]),
        "sequences": starts[-1],
        "valid_tokens": sum(p["valid_tokens"] for p in parts),
    }


def pieces(e: Example) -> list[Example]:
    """Splits into single sequences; the count of tokens is still that of the whole batch."""
    out = []
    for s in range(e["sequences"]):
        own = e["sequence"] == s
        out.append(
            {
                **e,
                **{name: e[name][own] for name in (*PER_TOKEN, "mask")},
                "sequence": e["sequence"][own] * 0,
                "sequences": 1,
            }
        )
    return out


def found(e: Example, options: GrpoOptions) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns the loss, its gradient and the metrics."""
    logprobs = e["logprobs"].clone().requires_grad_()
    loss, metrics = grpo(**{**e, "logprobs": logprobs}, options=options)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def test_the_loss_is_the_same_without_metrics() -> None:
    e = example()
    loss, nothing = grpo(**e, options=GrpoOptions(), with_metrics=False)
    assert torch.equal(loss, grpo(**e, options=GrpoOptions())[0])
    assert nothing == {}


def same(a: tuple[Tensor, Tensor, dict[str, Tensor]], b: tuple[Tensor, Tensor, dict[str, Tensor]]) -> bool:
    """Determines whether two results of ``found`` are equal to the last bit."""
    return (
        torch.equal(a[0], b[0])
        and torch.equal(a[1], b[1])
        and all(torch.equal(a[2][name], b[2][name]) for name in METRICS)
    )


def close(a: Tensor | float, b: Tensor | float) -> bool:
    """Compares to 1e-12, because sums of a few dozen float64 terms are in another order."""
    return torch.allclose(
        torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=1e-12, atol=1e-13
    )


# ---- a second derivation


def derived(e: Example, o: GrpoOptions) -> dict[str, Any]:
    """Computes everything token by token in plain Python, with the gradient derived by hand."""
    values = {name: e[name].tolist() for name in (*PER_TOKEN, "mask", "sequence")}
    trained = [t for t, m in enumerate(values["mask"]) if m]
    new, old, ref, vllm, adv = (values[name] for name in PER_TOKEN)
    x = {t: 0.0 if math.isnan(vllm[t]) else max(-10.0, min(10.0, old[t] - vllm[t])) for t in trained}
    rows: list[dict[str, float]] = []
    weights, gradient = [0.0] * len(new), [0.0] * len(new)
    count = int(e["valid_tokens"])
    denominator = count if o.loss_denominator == "token" else o.loss_denominator
    for t in trained:
        peers = [u for u in trained if values["sequence"][u] == values["sequence"][t]]
        own = math.exp(x[t])
        rho = math.exp(sum(x[u] for u in peers) / len(peers)) if o.rho_mask_sequence_level else own
        judged = sum(abs(math.exp(x[u]) - 1) for u in peers) / len(peers) if o.rho_mask_tv_divergence else rho
        may_drop = (x[t] > 0 < adv[t] or x[t] < 0 > adv[t]) or not o.rho_mask_tv_divergence
        low = may_drop and o.rho_mask_lower_bound > 0 and judged < o.rho_mask_lower_bound
        high = may_drop and o.rho_mask_upper_bound > 0 and judged > o.rho_mask_upper_bound
        w = rho
        if o.rho_clamp_lower_bound:
            w = max(w, o.rho_clamp_lower_bound)
        if o.rho_clamp_upper_bound:
            w = min(w, o.rho_clamp_upper_bound)
        clamped = w != rho
        if low or high:
            w = 0.0
        if not o.use_rho_correction:
            w, clamped, low, high = 1.0, False, False, False

        r = math.exp(new[t] - old[t])
        if o.loss_fn == "cispo":
            cut = r > 1 + o.clip_higher
            factor = 1 + o.clip_higher if cut else r
            policy, slope = -adv[t] * factor * new[t], -adv[t] * factor
        else:
            cut = (adv[t] > 0 and r > 1 + o.clip_higher) or (adv[t] < 0 and r < 1 - o.clip_lower)
            bound = 1 + o.clip_higher if adv[t] > 0 else 1 - o.clip_lower
            policy, slope = (-adv[t] * bound, 0.0) if cut else (-adv[t] * r, -adv[t] * r)
        delta = new[t] - ref[t]
        inside, d = abs(delta) < 40, max(-40.0, min(40.0, delta))
        kls = (d, d * d / 2, math.exp(-d) - 1 + d, r * d)
        slopes = (float(inside), d * inside, (1 - math.exp(-d)) * inside, r * d + r * inside)
        k = o.kl_estimator
        total = w * policy + o.beta * kls[k]
        weights[t] = w
        gradient[t] = o.loss_scale / denominator * (w * slope + o.beta * slopes[k])
        rows.append(
            {f"kl{i}": kls[i] for i in range(4)}
            | {
                "kl_avg": o.beta * kls[k],
                "policy_avg": w * policy,
                "total_avg": total,
                "clipfrac": cut and not low and not high,
            }
            | {"ratio_mean": r, "ratio_square_mean": r * r, "rho_mean": own, "rho_weight": w, "rho_clipfrac": clamped}
            | {"rho_drop_frac": low or high, "rho_drop_low_frac": low, "rho_drop_high_frac": high}
        )
    metrics = {name: sum(row[name] for row in rows) / count for name in METRICS - {"rho_min", "rho_max"}}
    metrics |= {"rho_min": min(math.exp(v) for v in x.values()), "rho_max": max(math.exp(v) for v in x.values())}
    loss = o.loss_scale / denominator * sum(row["total_avg"] for row in rows)
    return {"loss": loss, "gradient": gradient, "metrics": metrics, "weights": weights}


def agrees_with_derivation(e: Example, options: GrpoOptions) -> None:
    loss, gradient, metrics = found(e, options)
    expected = derived(e, options)
    assert close(loss, expected["loss"])
    assert close(gradient, numbers(*expected["gradient"]))
    assert set(metrics) == METRICS
    for name in METRICS:
        assert close(metrics[name], expected["metrics"][name]), name
        assert not metrics[name].requires_grad


@pytest.mark.parametrize("seed", range(2))
@each_kind
def test_token_by_token(options: GrpoOptions, seed: int) -> None:
    agrees_with_derivation(long_example(seed), options)


def bound(low: float, high: float) -> st.SearchStrategy[float]:
    return st.just(0.0) | st.floats(low, high)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**32 - 1),
    st.builds(
        GrpoOptions,
        loss_fn=st.sampled_from(["dapo", "cispo"]),
        clip_lower=st.floats(0, 0.9),
        clip_higher=st.floats(0, 2),
        beta=st.floats(0, 2),
        kl_estimator=st.integers(0, 3),
        loss_denominator=st.just("token") | st.floats(0.01, 1e4),
        loss_scale=st.integers(1, 64),
        use_rho_correction=st.booleans(),
        rho_clamp_lower_bound=bound(0.1, 0.9),
        rho_clamp_upper_bound=bound(1.1, 3),
        rho_mask_lower_bound=bound(0.1, 0.9),
        rho_mask_upper_bound=bound(1.1, 3),
        rho_mask_sequence_level=st.booleans(),
        rho_mask_tv_divergence=st.booleans(),
    ),
)
def test_token_by_token_with_any_options(seed: int, options: GrpoOptions) -> None:
    e = example(seed)
    e["mask"][0] = True  # so that there is a smallest rho
    agrees_with_derivation({**e, "valid_tokens": e["mask"].sum()}, options)


@pytest.mark.parametrize("seed", range(2))
def test_examples_cover_every_branch(seed: int) -> None:
    e = long_example(seed)
    assert e["advantages"][e["mask"]].sign().unique().tolist() == [-1, 1]
    for options in EVERY_KIND:
        metrics = found(e, options)[2]
        seen = {"clipfrac"}
        seen |= {"rho_drop_low_frac"} if options.rho_mask_lower_bound else set()
        seen |= {"rho_drop_high_frac"} if options.rho_mask_upper_bound else set()
        seen |= {"rho_clipfrac"} if options.use_rho_correction else set()
        assert {name for name in METRICS if 0 < metrics[name] < 1} >= seen


# ---- by hand


@pytest.mark.parametrize(
    ("loss_fn", "r", "advantage", "loss", "gradient", "clipped"),
    [
        ("dapo", 1.5, 1.0, -1.272, 0.0, 1),  # above, where a larger ratio would gain: stopped
        ("dapo", 1.5, -1.0, 1.5, 1.5, 0),  # above, but moving back
        ("dapo", 0.5, 1.0, -0.5, -0.5, 0),
        ("dapo", 0.5, -1.0, 0.8, 0.0, 1),
        ("dapo", 1.1, 1.0, -1.1, -1.1, 0),
        ("dapo", 1.1, -2.0, 2.2, 2.2, 0),
        ("dapo", 0.9, 1.0, -0.9, -0.9, 0),
        ("dapo", 0.9, -1.0, 0.9, 0.9, 0),
        ("cispo", 1.5, 1.0, 2.544, -1.272, 1),  # log p = -2; the clipped token has a gradient
        ("cispo", 1.5, -1.0, -2.544, 1.272, 1),
        ("cispo", 0.5, 1.0, 1.0, -0.5, 0),  # no clip below
        ("cispo", 0.5, -1.0, -1.0, 0.5, 0),
        ("cispo", 1.1, 1.0, 2.2, -1.1, 0),
        ("cispo", 1.1, -2.0, -4.4, 2.2, 0),
    ],
)
def test_clipping_by_hand(
    loss_fn: Any, r: float, advantage: float, loss: float, gradient: float, clipped: float
) -> None:
    got = found(tokens_of(r, 1.0, advantage), GrpoOptions(loss_fn=loss_fn, beta=0.0))
    assert close(got[0], loss)
    assert close(got[1], numbers(gradient))
    assert got[2]["clipfrac"] == clipped
    assert close(got[2]["ratio_mean"], r)


E = math.exp


@pytest.mark.parametrize(
    ("d", "values", "slopes"),
    # The ratio is r = 1.5. Estimator 3 contains it, with the derivative d(r d) = r d + r.
    [
        (0.0, (0, 0, 0, 0), (1, 0, 0, 1.5)),
        (0.5, (0.5, 0.125, E(-0.5) - 0.5, 0.75), (1, 0.5, 1 - E(-0.5), 2.25)),
        (-0.5, (-0.5, 0.125, E(0.5) - 1.5, -0.75), (1, -0.5, 1 - E(0.5), 0.75)),
        (39.0, (39, 760.5, E(-39) + 38, 58.5), (1, 39, 1 - E(-39), 60)),
        (-39.0, (-39, 760.5, E(39) - 40, -58.5), (1, -39, 1 - E(39), -57)),
        (50.0, (40, 800, E(-40) + 39, 60), (0, 0, 0, 60)),  # clamped: only the gradient of r is left
        (-50.0, (-40, 800, E(40) - 41, -60), (0, 0, 0, -60)),
    ],
)
def test_kl_by_hand(d: float, values: tuple[float, ...], slopes: tuple[float, ...]) -> None:
    for k in range(4):
        options = GrpoOptions(kl_estimator=k, beta=0.1)  # type: ignore[arg-type]
        loss, gradient, metrics = found(tokens_of(1.5, 1.0, 0.0, d=d), options)
        assert close(loss, 0.1 * values[k])
        assert close(gradient, numbers(0.1 * slopes[k]))
        assert close(metrics["kl_avg"], 0.1 * values[k])
        assert all(close(metrics[f"kl{i}"], values[i]) for i in range(4))


def rho_metrics(metrics: dict[str, Tensor]) -> tuple[float, ...]:
    return tuple(float(metrics[f"rho_{name}"]) for name in ("clipfrac", "drop_low_frac", "drop_high_frac"))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
@pytest.mark.parametrize(
    ("rho", "options", "weight", "clipped_low_high"),
    [
        (0.3, {}, 0.3, (0, 0, 0)),
        (1.7, {}, 1.7, (0, 0, 0)),
        (5.0, {}, 2.0, (1, 0, 0)),  # clamped above by default
        (5.0, {"rho_clamp_upper_bound": 0.0}, 5.0, (0, 0, 0)),  # 0 disables
        (5.0, {"rho_clamp_upper_bound": 4.0}, 4.0, (1, 0, 0)),
        (0.3, {"rho_clamp_lower_bound": 0.5}, 0.5, (1, 0, 0)),
        (0.6, {"rho_clamp_lower_bound": 0.5}, 0.6, (0, 0, 0)),
        (0.3, {"rho_mask_lower_bound": 0.5}, 0.0, (0, 1, 0)),
        (0.6, {"rho_mask_lower_bound": 0.5}, 0.6, (0, 0, 0)),
        (1.7, {"rho_mask_lower_bound": 0.5}, 1.7, (0, 0, 0)),
        (1.7, {"rho_mask_upper_bound": 1.5}, 0.0, (0, 0, 1)),
        (1.4, {"rho_mask_upper_bound": 1.5}, 1.4, (0, 0, 0)),
        (0.3, {"rho_mask_upper_bound": 1.5}, 0.3, (0, 0, 0)),
        (5.0, {"rho_mask_upper_bound": 3.0}, 0.0, (1, 0, 1)),  # the clamp changes it as well
        # the mask applies to rho before the clamp
        (0.3, {"rho_mask_lower_bound": 0.5, "rho_clamp_lower_bound": 0.9}, 0.0, (1, 1, 0)),
        (E(20), {"rho_clamp_upper_bound": 0.0}, E(10), (0, 0, 0)),
        (E(-20), {}, E(-10), (0, 0, 0)),
        (5.0, {"use_rho_correction": False, "rho_mask_upper_bound": 3.0}, 1.0, (0, 0, 0)),
    ],
)
def test_rho_by_hand(
    rho: float, options: dict[str, Any], weight: float, clipped_low_high: Any, advantage: float, loss_fn: Any
) -> None:
    loss, gradient, metrics = found(tokens_of(1.0, rho, advantage), GrpoOptions(beta=0.0, loss_fn=loss_fn, **options))
    assert close(loss, -advantage * weight * (-2 if loss_fn == "cispo" else 1))
    assert close(gradient, numbers(-advantage * weight))
    assert close(metrics["rho_weight"], weight)
    assert close(metrics["rho_mean"], min(max(rho, E(-10)), E(10)))
    assert metrics["rho_min"] == metrics["rho_max"] == metrics["rho_mean"]
    assert rho_metrics(metrics) == clipped_low_high
    assert metrics["rho_drop_frac"] == metrics["rho_drop_low_frac"] + metrics["rho_drop_high_frac"]


def weights_of(e: Example, **options: Any) -> list[float]:
    """Computes the weights from the gradient, which at ratio 1 is -w A / N."""
    gradient = found(e, GrpoOptions(beta=0.0, **options))[1]
    return (-gradient * e["valid_tokens"] / e["advantages"]).tolist()


def test_mask_bounds_are_inclusive() -> None:
    for x in (-0.7, 0.7):
        e = tokens_of(1.0, 1.0)
        e["old_logprobs"], e["vllm_logprobs"] = numbers(x), numbers(0.0)  # so that rho is exactly the bound
        at = float(numbers(x).exp())
        name = "rho_mask_lower_bound" if x < 0 else "rho_mask_upper_bound"
        beyond = math.nextafter(at, 1.0)
        assert rho_metrics(found(e, GrpoOptions(**{name: at}))[2])[1:] == (0, 0)  # type: ignore[arg-type]
        assert sum(rho_metrics(found(e, GrpoOptions(**{name: beyond}))[2])[1:]) == 1  # type: ignore[arg-type]


def test_sequence_level_rho_by_hand() -> None:
    """The geometric means are 1, 4, 1/4 and 2: the bounds drop the second and the third sequence.

    The upper bound drops the second, the lower bound the third. No document affects another's rho.
    """
    e = joined(
        *(
            tokens_of(1.0, rho, advantages=[1.0, -1.0, 1.0])
            for rho in ([0.25, 1.0, 4.0], [4.0] * 3, [0.25] * 3, [1.0, 2.0, 4.0])
        )
    )
    bounds = {"rho_mask_sequence_level": True, "rho_mask_lower_bound": 0.5, "rho_mask_upper_bound": 3.0}
    assert weights_of(e, **bounds) == pytest.approx([1.0] * 3 + [0.0] * 6 + [2.0] * 3, rel=1e-12)
    assert weights_of(e, rho_mask_sequence_level=True, rho_clamp_upper_bound=1.5) == pytest.approx(
        [1.0] * 3 + [1.5] * 3 + [0.25] * 3 + [1.5] * 3
    )
    metrics = found(e, GrpoOptions(**bounds))[2]  # type: ignore[arg-type]
    assert rho_metrics(metrics) == (0.25, 0.25, 0.25)
    assert close(metrics["rho_mean"], (5.25 + 12 + 0.75 + 7) / 12)  # each token's own rho
    assert close(metrics["rho_max"], 4)
    assert close(metrics["rho_min"], 0.25)
    token_level = weights_of(e, **(bounds | {"rho_mask_sequence_level": False}), rho_clamp_upper_bound=0.0)
    assert token_level == pytest.approx([0.0, 1.0, 0.0] + [0.0] * 6 + [1.0, 2.0, 0.0])


def test_sequence_level_rho_averages_trained_tokens_alone() -> None:
    e = tokens_of(1.0, [4.0, 9.0, 4.0, 1.0])
    e["mask"] = torch.tensor([True, False, True, False])
    e["valid_tokens"] = torch.tensor(2)
    for more in ({"rho_mask_sequence_level": True}, {"rho_mask_tv_divergence": True, "rho_mask_upper_bound": 3.5}):
        assert weights_of(e, **more, rho_clamp_upper_bound=0.0) == pytest.approx([4.0, 0.0, 4.0, 0.0])


def test_tv_mask_by_hand() -> None:
    """The means of |rho - 1| are 1.25, 3 and (0.9 + 5 + 5 + 0 + 0.9) / 5 = 2.36.

    Only tokens whose update moves rho further from 1 are dropped.
    """
    first, second = tokens_of(1.0, [0.25, 1.0, 4.0]), tokens_of(1.0, [4.0] * 3, [1.0, -1.0, 2.0])
    third = tokens_of(1.0, [0.1, 6.0, 6.0, 1.0, 0.1], [-1.0, 1.0, -1.0, -1.0, 1.0])
    e = joined(first, second, third)
    tv = {"rho_mask_tv_divergence": True, "rho_clamp_upper_bound": 0.0}
    own = [0.25, 1.0, 4.0, 4.0, 4.0, 4.0, 0.1, 6.0, 6.0, 1.0, 0.1]
    high = [1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1]
    assert weights_of(e, **tv, rho_mask_upper_bound=2.0) == pytest.approx(
        [w * k for w, k in zip(own, high, strict=True)], rel=1e-12
    )
    # The first sequence diverges too little: its one token that would increase tv is dropped.
    low = [1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert weights_of(e, **tv, rho_mask_lower_bound=2.0) == pytest.approx(
        [w * k for w, k in zip(own, low, strict=True)], rel=1e-12
    )
    metrics = found(e, GrpoOptions(**tv, rho_mask_upper_bound=2.0, rho_mask_lower_bound=1.5))[2]  # type: ignore[arg-type]
    assert rho_metrics(metrics) == (0, pytest.approx(1 / 11), pytest.approx(4 / 11))


def test_documents_do_not_share_rho() -> None:
    """open-instruct's average over a packed row would be 1 here, and would drop nothing."""
    a, b = tokens_of(1.0, [4.0, 4.0]), tokens_of(1.0, [0.25, 0.25])
    assert weights_of(joined(a, b), rho_mask_sequence_level=True, rho_clamp_upper_bound=0.0) == pytest.approx(
        [4.0, 4.0, 0.25, 0.25]
    )
    apart = weights_of(joined(a, b), rho_mask_sequence_level=True, rho_mask_upper_bound=3.0, rho_mask_lower_bound=0.5)
    assert apart == [0, 0, 0, 0]
    tv = weights_of(joined(a, tokens_of(1.0, [1.1, 1.1])), rho_mask_tv_divergence=True, rho_mask_upper_bound=2.0)
    assert tv == pytest.approx([0, 0, 1.1, 1.1])


def test_nan_of_vllm_at_a_trained_token_means_no_correction() -> None:
    e = tokens_of(1.0, [4.0, 1.0, 0.25])
    e["vllm_logprobs"][1] = nan
    assert weights_of(e, rho_clamp_upper_bound=0.0) == pytest.approx([4.0, 1.0, 0.25])
    e["vllm_logprobs"][2] = nan
    assert weights_of(e, rho_mask_sequence_level=True) == pytest.approx(
        [4 ** (1 / 3)] * 3
    )  # the two NaN count as rho = 1
    assert weights_of(e, rho_mask_tv_divergence=True, rho_mask_upper_bound=0.9) == pytest.approx([0, 1, 1])
    assert not any(metric.isnan() for metric in found(e, GrpoOptions())[2].values())


def test_no_gradient_flows_through_the_weights() -> None:
    e = {
        name: x
        for name, x in tokens_of(1.0, 0.5).items()
        if name not in ("logprobs", "reference_logprobs", "valid_tokens")
    }
    weights = importance_weights(**{**e, "old_logprobs": e["old_logprobs"].requires_grad_()}, options=RhoOptions())
    assert not any(x.requires_grad for x in weights)


def test_a_dropped_token_is_not_clipped_and_keeps_its_kl() -> None:
    e = tokens_of(1.5, 5.0, d=0.5)
    kept, dropped = (found(e, GrpoOptions(beta=1.0, rho_mask_upper_bound=b)) for b in (0.0, 3.0))
    assert (kept[2]["clipfrac"], dropped[2]["clipfrac"]) == (1, 0)
    assert close(dropped[0], E(-0.5) - 0.5)
    assert close(dropped[1], numbers(1 - E(-0.5)))


def test_loss_and_metrics_of_two_tokens_by_hand() -> None:
    e = joined(tokens_of(1.5, 0.5, 2.0, d=0.5), tokens_of(0.5, 1.5, 1.0, d=-0.5))
    loss, gradient, metrics = found(e, GrpoOptions(kl_estimator=0, beta=0.1, loss_denominator=0.5, loss_scale=3))
    first, second = 0.5 * -2 * 1.272, 1.5 * -0.5
    assert close(loss, 3 * (first + 0.05 + second - 0.05) / 0.5)
    assert close(gradient, numbers(0.1, -0.75 + 0.1) * 3 / 0.5)
    expected = {
        "policy_avg": (first + second) / 2,
        "kl_avg": 0,
        "total_avg": (first + second) / 2,
        "kl0": 0,
        "kl1": 0.125,
        "kl3": (0.75 - 0.25) / 2,
    }
    expected |= {
        "clipfrac": 0.5,
        "ratio_mean": 1,
        "ratio_square_mean": 1.25,
        "rho_mean": 1,
        "rho_weight": 1,
        "rho_min": 0.5,
        "rho_max": 1.5,
    }
    assert all(close(metrics[name], value) for name, value in expected.items())


# ---- identities


@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
def test_on_policy_the_gradient_is_that_of_reinforce(loss_fn: Any) -> None:
    e = example(seed=5)
    options = GrpoOptions(loss_fn=loss_fn, beta=0.0, use_rho_correction=False)
    reinforce = torch.where(e["mask"], -e["advantages"], 0.0) / e["valid_tokens"]
    for old in (None, e["logprobs"]):
        _, gradient, metrics = found({**e, "old_logprobs": old}, options)
        assert close(gradient, reinforce)
        assert (metrics["ratio_mean"], metrics["ratio_square_mean"], metrics["clipfrac"]) == (1, 1, 0)


def test_absent_old_logprobs_equal_the_new_ones() -> None:
    e = example(seed=6)
    for options in EVERY_KIND:
        assert same(found({**e, "old_logprobs": None}, options), found({**e, "old_logprobs": e["logprobs"]}, options))


def test_cispo_is_reinforce_with_a_detached_clipped_ratio() -> None:
    e = example(seed=7)
    factor = torch.minimum((e["logprobs"] - e["old_logprobs"]).exp(), numbers(1.272))
    expected = torch.where(e["mask"], -e["advantages"] * factor, 0.0) / e["valid_tokens"]
    assert close(found(e, GrpoOptions(loss_fn="cispo", beta=0.0, use_rho_correction=False))[1], expected)


@settings(deadline=None)
@given(st.floats(-60, 60))
def test_estimate_2_is_not_negative(d: float) -> None:
    assert kl_estimates(numbers(d), numbers(1.0))[2] >= 0


def test_estimate_2_is_zero_with_zero_gradient_at_equality() -> None:
    e = example(seed=8)
    e["reference_logprobs"], e["advantages"] = e["logprobs"], e["advantages"] * 0
    loss, gradient, metrics = found(e, GrpoOptions(beta=1.0))
    assert loss == metrics["kl2"] == 0
    assert not gradient.any()


def test_expectations_of_kl_estimates() -> None:
    """Takes exact means over a vocabulary of five.

    The mean of the values is KL(p || q), except for estimate 1. The means of the gradients are 0,
    and the gradients of KL(p || q), KL(q || p) and KL(p || q).
    """
    generator = torch.Generator().manual_seed(0)
    z, other = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    z = z.requires_grad_()
    log_p, log_q = torch.log_softmax(z, 0), torch.log_softmax(other, 0)
    p, q = log_p.exp(), log_q.exp()
    kl, reverse_kl = (p * (log_p - log_q)).sum(), (q * (log_q - log_p)).sum()
    gradients = {
        name: torch.autograd.grad(x, z, retain_graph=True)[0] for name, x in (("kl", kl), ("reverse", reverse_kl))
    }
    means = [(p.detach() * x).sum() for x in kl_estimates(log_p - log_q, p / p.detach())]
    assert all(close(means[k], kl) for k in (0, 2, 3))
    assert not close(means[1], kl)
    for mean, expected in zip(
        means, (torch.zeros(5), gradients["kl"], gradients["reverse"], gradients["kl"]), strict=True
    ):
        assert close(torch.autograd.grad(mean, z, retain_graph=True)[0], expected)


def test_loss_scale_undoes_an_average_over_ranks() -> None:
    """Each of four ranks has one sequence, and DeepSpeed averages their losses."""
    e = example(seed=10)
    whole, parts = found(e, GrpoOptions()), [found(piece, GrpoOptions(loss_scale=4)) for piece in pieces(e)]
    assert close(sum(loss for loss, _, _ in parts) / 4, whole[0])
    assert close(torch.cat([gradient for _, gradient, _ in parts]) / 4, whole[1])
    assert close(sum(metrics["total_avg"] for _, _, metrics in parts), whole[2]["total_avg"])  # without the scale


def test_variance_of_the_ratio_from_its_moments() -> None:
    e = example(seed=11)
    parts = [found(piece, GrpoOptions())[2] for piece in pieces(e)]
    mean, square = (sum(part[name] for part in parts) for name in ("ratio_mean", "ratio_square_mean"))
    assert close(square - mean**2, (e["logprobs"] - e["old_logprobs"])[e["mask"]].exp().var(correction=0))


# ---- options


def test_clip_lower_has_no_effect_on_cispo() -> None:
    assert same(*(found(long_example(0), GrpoOptions(loss_fn="cispo", clip_lower=c)) for c in (0.0, 0.9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": "ppo"}, "loss_fn is 'ppo'"),
        ({"clip_lower": 1.5}, "clip_lower is 1.5"),
        ({"clip_higher": -0.1}, "clip_higher is -0.1"),
        ({"clip_higher": inf}, "clip_higher is inf"),
        ({"beta": nan}, "beta is nan"),
        ({"kl_estimator": 4}, "kl_estimator is 4"),
        ({"loss_denominator": 0.0}, "loss_denominator is 0.0"),
        ({"loss_denominator": nan}, "loss_denominator is nan"),
        ({"loss_denominator": "tokens"}, "loss_denominator is 'tokens'; expected 'token'"),
        ({"loss_scale": 0}, "loss_scale is 0"),
        ({"loss_scale": 1.5}, "loss_scale is 1.5"),
        ({"rho_clamp_lower_bound": 1.0}, "rho_clamp_lower_bound is 1.0; expected 0, or a number between 0 and 1"),
        ({"rho_clamp_upper_bound": 1.0}, "rho_clamp_upper_bound is 1.0; expected 0, or a finite number above 1"),
        ({"rho_clamp_upper_bound": inf}, "rho_clamp_upper_bound is inf"),
        ({"rho_mask_lower_bound": -0.5}, "rho_mask_lower_bound is -0.5"),
        ({"rho_mask_upper_bound": 0.5}, "rho_mask_upper_bound is 0.5; expected 0, or a finite number above 1"),
        (
            {"rho_mask_upper_bound": 0.5, "rho_mask_lower_bound": 0.5, "rho_mask_tv_divergence": True},
            "rho_mask_upper_bound is 0.5.*more than rho_mask_lower_bound=0.5",
        ),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    unchecked = GrpoOptions()  # bypasses the type checks of the test run, which users do not have
    for name, value in options.items():
        object.__setattr__(unchecked, name, value)
    with pytest.raises(ValueError, match=message):
        unchecked.__post_init__()


def test_tv_bounds_are_in_their_own_unit() -> None:
    GrpoOptions(rho_mask_tv_divergence=True, rho_mask_lower_bound=0.1, rho_mask_upper_bound=0.2)
    GrpoOptions(rho_mask_tv_divergence=True, rho_mask_lower_bound=2.0)


def test_shapes_are_checked() -> None:
    with pytest.raises(Exception, match="advantages"):
        found({**example(), "advantages": numbers(1.0)}, GrpoOptions())
