# SPDX-License-Identifier: Apache-2.0
"""Tests of the divergences between two models.

The methods are torch's ``kl_div``, fractions, mpmath, closed forms, limits and
properties.
"""

import math
from fractions import Fraction

import mpmath
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from dense_losses import divergence
from dense_losses.divergence import DivergenceKind

KINDS: tuple[DivergenceKind, ...] = ("forward", "reverse", "jsd")


def two_models(std: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the logits of student and teacher."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = std * torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    return student, teacher


@pytest.mark.parametrize("std", [0.1, 1.0, 30.0])
def test_kl_is_that_of_torch(std: float) -> None:
    student, teacher = two_models(std)
    log_q, log_p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    forward = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    reverse = kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(divergence(student, teacher, "forward"), forward, rtol=1e-12, atol=1e-14)
    assert torch.allclose(divergence(student, teacher, "reverse"), reverse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("std", [0.1, 3.0, 30.0, 300.0])
@pytest.mark.parametrize("kind", KINDS)
def test_values_by_mpmath(kind: DivergenceKind, std: float) -> None:
    """Compares with a thousand digits, of probabilities and not of their logarithms."""
    (student, teacher), beta = two_models(std, seed=1), 0.3
    found = divergence(student, teacher, kind, beta)
    with mpmath.workdps(1000):

        def probabilities(row: Tensor) -> list[mpmath.mpf]:
            exps = [mpmath.exp(mpmath.mpf(float(z))) for z in row]
            return [x / sum(exps) for x in exps]

        def kl(a: list[mpmath.mpf], b: list[mpmath.mpf]) -> mpmath.mpf:
            return sum(x * mpmath.log(x / y) for x, y in zip(a, b, strict=True))

        for i in range(len(student)):
            q, p = probabilities(student[i]), probabilities(teacher[i])
            mix = [mpmath.mpf(beta) * x + (1 - mpmath.mpf(beta)) * y for x, y in zip(p, q, strict=True)]
            jsd = mpmath.mpf(beta) * kl(p, mix) + (1 - mpmath.mpf(beta)) * kl(q, mix)
            expected = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": jsd}[kind]
            assert float(found[i]) == pytest.approx(float(expected), rel=1e-11, abs=1e-13)


@pytest.mark.parametrize("std", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_closed_forms(kind: DivergenceKind, std: float) -> None:
    """That of the forward KL is q - p. The others are q (x - <q, x>), with x = log(q / p) for the
    reverse KL, and x = (1 - beta) log(q / r) for the mixture r, through which no gradient flows.
    """
    (student, teacher), beta = two_models(std, seed=3), 0.3
    (found,) = torch.autograd.grad(divergence(student.requires_grad_(), teacher, kind, beta).sum(), student)
    with torch.no_grad():
        q, p = (z.exp() / z.exp().sum(1, keepdim=True) for z in (student, teacher))
        x = (1 - beta) * (q / (beta * p + (1 - beta) * q)).log() if kind == "jsd" else (q / p).log()
        expected = q - p if kind == "forward" else q * (x - (q * x).sum(1, keepdim=True))
    assert torch.allclose(found, expected, rtol=1e-11, atol=1e-14)


def test_values_by_hand() -> None:
    """A student of (1/4, 3/4) and a teacher of (1/2, 1/2), by fractions and logarithms of them."""
    q, p, b = (Fraction(1, 4), Fraction(3, 4)), (Fraction(1, 2), Fraction(1, 2)), Fraction(1, 4)
    r = tuple(b * x + (1 - b) * y for x, y in zip(p, q, strict=True))
    assert r == (Fraction(5, 16), Fraction(11, 16))

    def kl(x: tuple[Fraction, ...], y: tuple[Fraction, ...]) -> float:
        return math.fsum(a * math.log(a / c) for a, c in zip(x, y, strict=True))

    student, teacher = (torch.tensor([[float(x) for x in row]], dtype=torch.float64).log() for row in (q, p))
    assert float(divergence(student, teacher, "forward")) == pytest.approx(kl(p, q), rel=1e-14)
    assert float(divergence(student, teacher, "reverse")) == pytest.approx(kl(q, p), rel=1e-14)
    mixed = kl(p, r) / 4 + 3 * kl(q, r) / 4
    assert float(divergence(student, teacher, "jsd", 0.25)) == pytest.approx(mixed, rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_large_logits_are_finite_forward_and_backward(kind: DivergenceKind) -> None:
    """Both models are sure, of different tokens, by 2,000 nats."""
    student, teacher = (
        1e3 * torch.tensor([row], dtype=torch.float64) for row in ([1.0, -1.0, -1.0], [-1.0, 1.0, -1.0])
    )
    found = divergence(student.requires_grad_(), teacher, kind, 0.3)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    bound = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)  # the entropy of the weights
    assert float(found.detach()) == pytest.approx(bound if kind == "jsd" else 2e3, rel=1e-12)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_neither_has_makes_nan(kind: DivergenceKind) -> None:
    """As torch's own KL does: a padded vocabulary is left out before."""
    student, teacher = (torch.tensor([row]).double() for row in ([1.0, 2.0, -torch.inf], [0.0, 1.0, -torch.inf]))
    assert bool(divergence(student, teacher, kind).isnan().all())
    log_q, log_p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    assert bool(kl_div(log_q, log_p, reduction="sum", log_target=True).isnan())


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_no_gradient_flows_through_the_mixture(beta: float) -> None:
    student, teacher = two_models(seed=7)
    (found,) = torch.autograd.grad(divergence(student.requires_grad_(), teacher, "jsd", beta).sum(), student)
    q, p = torch.softmax(student, -1), torch.softmax(teacher, -1)
    r = (beta * p + (1 - beta) * q).detach()
    stopped = (1 - beta) * (q * (q / r).log()).sum()
    assert torch.allclose(found, torch.autograd.grad(stopped, student)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_one_column_has_no_divergence(kind: DivergenceKind) -> None:
    assert float(divergence(torch.tensor([[3.0]]), torch.tensor([[-2.0]]), kind)) == 0.0


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_mixture_needs_both(beta: float) -> None:
    student, teacher = two_models()
    with pytest.raises(ValueError, match=rf"beta is {beta}; expected a weight above 0 and below 1"):
        divergence(student, teacher, "jsd", beta)
    assert bool(divergence(student, teacher, "forward", beta).isfinite().all())  # it has no mixture


@pytest.mark.parametrize("kind", KINDS)
def test_zero_for_equal_models_and_positive_for_others(kind: DivergenceKind) -> None:
    student, teacher = two_models(seed=4)
    assert torch.allclose(divergence(teacher + 3.0, teacher, kind, 0.3), torch.zeros(4).double(), atol=1e-14)
    assert bool((divergence(student, teacher, kind, 0.3) > 1e-3).all())


def test_jsd_tends_to_forward_kl_for_small_beta_and_to_reverse_kl_for_large() -> None:
    """Divided by the small weight, as in equation 1 of Agarwal et al. 2024."""
    student, teacher = two_models(seed=5)
    small, large = (divergence(student, teacher, "jsd", beta) / 1e-6 for beta in (1e-6, 1 - 1e-6))
    assert torch.allclose(small, divergence(student, teacher, "forward"), rtol=1e-4)
    assert torch.allclose(large, divergence(student, teacher, "reverse"), rtol=1e-4)


def test_jsd_with_beta_of_one_half_is_symmetric_and_at_most_log_2() -> None:
    student, teacher = two_models(std=1e3, seed=6)
    found = divergence(student, teacher, "jsd", 0.5)
    assert torch.allclose(found, divergence(teacher, student, "jsd", 0.5), rtol=1e-12)
    assert float(found.max()) <= torch.tensor(2.0).log().double() + 1e-6
