# SPDX-License-Identifier: Apache-2.0
"""Tests of the KL estimators: hand computation, and what they estimate.

The expectations are checked by exact sums over the outcomes, and by samples with a z test.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dense_losses.kl import js_estimate, kl_estimate

KINDS = ("k1", "k2", "k3")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate(logprobs: Tensor, reference: Tensor, kind: str, **rest: Any) -> Tensor:
    return kl_estimate(logprobs=logprobs, reference_logprobs=reference, kl_type=kind, **rest)  # type: ignore[arg-type]


def weighted(logprobs: Tensor, reference: Tensor, kind: str, **rest: Any) -> Tensor:
    """Computes the estimate with the weight of value 1 that adds the score term."""
    return estimate(logprobs, reference, kind, weights=(logprobs - logprobs.detach()).exp(), **rest)


def gradient(of: Callable[..., Tensor], logprobs: Tensor, *rest: Any, **named: Any) -> Tensor:
    leaf = logprobs.clone().requires_grad_()
    return torch.autograd.grad(of(leaf, *rest, **named).sum(), leaf)[0]


# Each case is one token with log p = -1 and d = log q - log p.
@pytest.mark.parametrize(
    ("kind", "d", "value", "slope", "weighted_slope"),
    [
        ("k1", 0.5, -0.5, 1.0, 0.5),
        ("k1", -0.5, 0.5, 1.0, 1.5),
        ("k2", 0.5, 0.125, -0.5, -0.375),
        ("k2", -0.5, 0.125, 0.5, 0.625),
        ("k3", math.log(2), 1 - math.log(2), -1.0, -math.log(2)),
        ("k3", -math.log(2), math.log(2) - 0.5, 0.5, math.log(2)),
    ],
)
def test_by_hand(kind: str, d: float, value: float, slope: float, weighted_slope: float) -> None:
    """With the score term k3 has the slope log p - log q: (1 - exp(d)) + (exp(d) - 1 - d) = -d."""
    p, q = f64(-1.0), f64(-1.0 + d)
    assert float(estimate(p, q, kind)) == pytest.approx(value, rel=1e-14)
    assert float(weighted(p, q, kind)) == pytest.approx(value, rel=1e-14)
    assert float(gradient(estimate, p, q, kind)) == pytest.approx(slope, rel=1e-14)
    assert float(gradient(weighted, p, q, kind)) == pytest.approx(weighted_slope, rel=1e-14)


# The input is clamped to +- 2, the output to +- 3. Weights are 1 and add the score term.
@pytest.mark.parametrize(
    ("kind", "d", "value", "slope"),
    [
        ("k1", 1.0, -1.0, 1 - 1.0),
        ("k1", 5.0, -2.0, 0),
        ("k1", -5.0, 2.0, 0),
        ("k2", 1.0, 0.5, -1.0 + 0.5),
        ("k2", 5.0, 2.0, 0),
        ("k2", -5.0, 2.0, 0),
        ("k3", 1.0, math.e - 2, -1.0),
        ("k3", 1.9, 3.0, 0),  # only the output is clamped: exp(1.9) - 2.9 = 3.79
        ("k3", 5.0, 3.0, 0),
        ("k3", -5.0, math.exp(-2) + 1, 0),  # only the input is clamped
    ],
)
def test_clamps_by_hand(kind: str, d: float, value: float, slope: float) -> None:
    """No gradient flows where a clamp acts, not even through the weight."""
    p, q, bounds = f64(-6.0), f64(-6.0 + d), {"input_clamp_value": 2.0, "output_clamp_value": 3.0}
    assert float(weighted(p, q, kind, **bounds)) == pytest.approx(value, rel=1e-14)
    assert float(gradient(weighted, p, q, kind, **bounds)) == pytest.approx(slope, rel=1e-13, abs=1e-15)


def test_the_output_clamp_applies_to_the_weighted_estimate() -> None:
    """k1 = 2 times a weight of 3 is 6, clamped to 5; k1 = -2 gives -5. Unclamped: 6 and -6."""
    p, q, w = f64(-1.0, -4.0), f64(-3.0, -2.0), f64(3.0, 3.0)
    assert estimate(p, q, "k1", weights=w, output_clamp_value=5.0).tolist() == [5, -5]
    assert estimate(p, q, "k1", weights=w).tolist() == [6, -6]


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative(p: float, q: float) -> None:
    assert estimate(f64(p), f64(q), "k3") >= 0
    assert estimate(f64(p), f64(p + 1e-9 * q), "k3") >= 0


@given(st.floats(-50, 0))
def test_at_equality_the_divergence_and_its_slope_are_zero(p: float) -> None:
    for kind in KINDS:
        assert estimate(f64(p), f64(p), kind) == 0
        assert gradient(weighted, f64(p), f64(p), kind) == (1 if kind == "k1" else 0)
    assert gradient(estimate, f64(p), f64(p), "k3") == 0
    assert abs(js_estimate(f64(p), f64(p))) < 1e-14 * max(1, -p)


# What the estimators estimate: a softmax policy of theta and a reference, over OUTCOMES outcomes.
OUTCOMES, SAMPLES, ALPHA = 5, 200_000, 1e-6


def policies(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    theta, reference = (torch.randn(OUTCOMES, generator=generator, dtype=torch.float64) for _ in range(2))
    return theta, torch.log_softmax(reference, 0)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Computes KL(p || q) exactly from the log-probs of all outcomes."""
    return (p.exp() * (p - q)).sum()


def gradient_of_divergence(theta: Tensor, q: Tensor, of_q: bool = False) -> Tensor:
    """Computes d KL(p || q) / d theta = p (log p/q - KL), or d KL(q || p) / d theta = p - q."""
    p = torch.log_softmax(theta, 0)
    return p.exp() - q.exp() if of_q else p.exp() * (p - q - divergence(p, q))


def values_and_gradients(theta: Tensor, q: Tensor, of: Callable[..., Tensor], kind: str) -> tuple[Tensor, Tensor]:
    """Returns the estimate of each outcome, and its gradient with the outcome held fixed.

    The gradient is with respect to theta, ``[outcomes, theta]``.
    """
    jacobian = torch.autograd.functional.jacobian(lambda x: of(torch.log_softmax(x, 0), q, kind), theta)
    return of(torch.log_softmax(theta, 0), q, kind), jacobian  # type: ignore[return-value]


GRADIENTS = [
    # estimator, kind, and which divergence has the expected gradient
    (estimate, "k1", "zero"),
    (estimate, "k2", "KL(p||q)"),
    (estimate, "k3", "KL(q||p)"),
    (weighted, "k1", "KL(p||q)"),
    (weighted, "k2", "neither"),
    (weighted, "k3", "KL(p||q)"),
]


def expected_gradients(theta: Tensor, q: Tensor) -> dict[str, Tensor]:
    return {
        "zero": torch.zeros(OUTCOMES, dtype=torch.float64),
        "KL(p||q)": gradient_of_divergence(theta, q),
        "KL(q||p)": gradient_of_divergence(theta, q, of_q=True),
    }


@pytest.mark.parametrize("seed", range(5))
def test_expectations_exactly(seed: int) -> None:
    theta, q = policies(seed)
    p = torch.log_softmax(theta, 0)
    mean = {kind: (p.exp() * estimate(p, q, kind)).sum() for kind in KINDS}
    truth = divergence(p, q)
    assert float(mean["k1"]) == pytest.approx(float(truth), rel=1e-13)
    assert float(mean["k3"]) == pytest.approx(float(truth), rel=1e-13)
    assert abs(mean["k2"] - truth) > 1e-2 * truth


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("of", "kind", "which"), GRADIENTS)
def test_expected_gradients_exactly(seed: int, of: Callable[..., Tensor], kind: str, which: str) -> None:
    theta, q = policies(seed)
    mean = torch.log_softmax(theta, 0).exp() @ values_and_gradients(theta, q, of, kind)[1]
    for name, truth in expected_gradients(theta, q).items():
        assert ((mean - truth).norm() < 1e-13) == (name == which), name
        assert (mean - truth).norm() < 1e-13 or (mean - truth).norm() > 1e-2


def z_scores(samples: Tensor, truth: Tensor) -> Tensor:
    """Returns the z score of the mean of each column, which is about normal for so many samples."""
    return (samples.mean(0) - truth) / (samples.std(0) / math.sqrt(samples.shape[0]))


def limit(tests: int) -> float:
    """Returns the bound of |z| at which ``tests`` true hypotheses are all accepted.

    The probability of rejecting any of them is at most ALPHA (Bonferroni).
    """
    return NormalDist().inv_cdf(1 - ALPHA / tests / 2)


def test_expectations_by_samples() -> None:
    theta, q = policies(seed=0)
    p = torch.log_softmax(theta, 0)
    draws = torch.multinomial(p.exp(), SAMPLES, replacement=True, generator=torch.Generator().manual_seed(1))
    values = torch.stack([estimate(p, q, kind)[draws] for kind in KINDS], 1)
    z = z_scores(values, divergence(p, q)).abs()
    assert z[0] < limit(2)
    assert z[2] < limit(2)
    assert z[1] > 2 * limit(2)


@pytest.mark.parametrize(("of", "kind", "which"), GRADIENTS)
def test_expected_gradients_by_samples(of: Callable[..., Tensor], kind: str, which: str) -> None:
    theta, q = policies(seed=0)
    p = torch.log_softmax(theta, 0)
    draws = torch.multinomial(p.exp(), SAMPLES, replacement=True, generator=torch.Generator().manual_seed(2))
    samples = values_and_gradients(theta, q, of, kind)[1][draws]
    for name, truth in expected_gradients(theta, q).items():
        worst = z_scores(samples, truth).abs().max()
        assert (
            worst < limit(OUTCOMES * len(GRADIENTS)) if name == which else worst > 2 * limit(OUTCOMES * len(GRADIENTS))
        ), name


@pytest.mark.parametrize("seed", range(5))
def test_off_policy_weights_exactly(seed: int) -> None:
    """Samples from a third policy g, weighted by p/g, have the expectations of samples from p.

    This holds for the value and for the gradient with its score term.
    """
    theta, q = policies(seed)
    g = policies(seed + 100)[1]
    of = lambda p, reference, kind: estimate(p, reference, kind, weights=(p - g).exp())  # noqa: E731
    for kind in ("k1", "k3"):
        values, gradients = values_and_gradients(theta, q, of, kind)
        assert float((g.exp() * values).sum()) == pytest.approx(
            float(divergence(torch.log_softmax(theta, 0), q)), rel=1e-12
        )
        assert (g.exp() @ gradients - gradient_of_divergence(theta, q)).norm() < 1e-13


@pytest.mark.parametrize("seed", range(5))
def test_jensen_shannon_half_exactly(seed: int) -> None:
    """Over samples from g, the half for g has the expectation KL(g || m) / 2.

    With the opposite sign of d, as in NeMo-RL, it has another one.
    """
    theta, g = policies(seed)
    p = torch.log_softmax(theta, 0)
    m = torch.log((p.exp() + g.exp()) / 2)
    half = js_estimate(p, g) - (torch.exp(m - p) - 1 - (m - p)) / 2
    assert float((g.exp() * half).sum()) == pytest.approx(float(divergence(g, m)) / 2, rel=1e-12)
    turned = (torch.exp(g - m) - 1 - (g - m)) / 2
    assert abs((g.exp() * turned).sum() - divergence(g, m) / 2) > 1e-3 * divergence(g, m)


def test_jensen_shannon_by_hand() -> None:
    """With p = 1/2, g = 1/6, m = 1/3 it is (2/3 - 1 - log(2/3)) / 2 + (2 - 1 - log 2) / 2."""
    found = js_estimate(f64(math.log(1 / 2)), f64(math.log(1 / 6)))
    assert float(found) == pytest.approx((2 / 3 - math.log(2 / 3) - math.log(2)) / 2, rel=1e-13)
