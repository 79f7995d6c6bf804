# SPDX-License-Identifier: Apache-2.0
"""Tests of the z-loss, of label smoothing and of the soft-cap.

The methods are torch's own cross-entropy, closed forms, mpmath, limits and properties.
"""

import math

import mpmath
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dense_losses import smoothed_nll, softcapped, z_penalty

TOKENS, VOCAB = 6, 5
MASK = torch.tensor([True, True, False, True, False, True])


def logits_and_labels(std: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = std * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    return logits, torch.randint(VOCAB, (TOKENS,), generator=generator)


def smoothed(logits: Tensor, labels: Tensor, smoothing: float, mask: Tensor = MASK) -> Tensor:
    logprobs = torch.log_softmax(logits, -1)
    own = logprobs.gather(1, labels[:, None]).squeeze(1)
    return torch.stack(smoothed_nll(own, logprobs.mean(-1), mask, smoothing)).sum(0)


@pytest.mark.parametrize("std", [0.0, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75, 1.0])
def test_smoothing_is_that_of_torch(smoothing: float, std: float) -> None:
    logits, labels = logits_and_labels(std)
    theirs = cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    ours = smoothed(logits, labels, smoothing)
    assert torch.allclose(ours, torch.where(MASK, theirs, 0.0), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75, 1.0])
def test_gradient_of_smoothing_by_a_closed_form(smoothing: float) -> None:
    """It is p - t, where t are the smoothed labels."""
    logits, labels = logits_and_labels(seed=1)
    logits.requires_grad_()
    (found,) = torch.autograd.grad(smoothed(logits, labels, smoothing).sum(), logits)
    targets = (1 - smoothing) * torch.eye(VOCAB, dtype=torch.float64)[labels] + smoothing / VOCAB
    with torch.no_grad():
        p = logits.exp() / logits.exp().sum(1, keepdim=True)
    assert torch.allclose(found, (p - targets) * MASK[:, None], rtol=1e-12, atol=1e-14)


def test_smoothing_is_split_into_its_terms() -> None:
    """The first is the likelihood of the label, the second that of the whole vocabulary."""
    nll, smooth = smoothed_nll(torch.tensor([-2.0]), torch.tensor([-5.0]), torch.tensor([True]), 0.25)
    assert (float(nll), float(smooth)) == (1.5, 1.25)


@pytest.mark.parametrize("std", [0.1, 1.0, 30.0, 1e3])
def test_z_penalty_by_mpmath(std: float) -> None:
    logits, _ = logits_and_labels(std, seed=2)
    found = z_penalty(torch.logsumexp(logits, -1), MASK)
    with mpmath.workdps(50):
        exact = [mpmath.log(sum(mpmath.exp(mpmath.mpf(float(z))) for z in row)) ** 2 for row in logits]
    expected = torch.tensor([float(x) for x in exact], dtype=torch.float64)
    assert torch.allclose(found, torch.where(MASK, expected, 0.0), rtol=1e-13, atol=1e-13)


def test_gradient_of_z_penalty_by_a_closed_form() -> None:
    """It is 2 lse(z) p."""
    logits, _ = logits_and_labels(seed=3)
    logits.requires_grad_()
    (found,) = torch.autograd.grad(z_penalty(torch.logsumexp(logits, -1), MASK).sum(), logits)
    with torch.no_grad():
        exps = logits.exp()
        expected = 2 * exps.sum(1, keepdim=True).log() * exps / exps.sum(1, keepdim=True) * MASK[:, None]
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_z_penalty_of_large_logits(sign: float) -> None:
    """The normaliser of equal logits z is z + log V, above 0 or below."""
    logits = torch.full((TOKENS, VOCAB), sign * 1e3, dtype=torch.float64, requires_grad=True)
    found = z_penalty(torch.logsumexp(logits, -1), torch.ones(TOKENS, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    lse = sign * 1e3 + math.log(VOCAB)
    assert found.tolist() == pytest.approx([lse**2] * TOKENS, rel=1e-14)
    assert gradient.flatten().tolist() == pytest.approx([2 * lse / VOCAB] * TOKENS * VOCAB, rel=1e-13)


def test_z_penalty_is_0_for_a_normalised_softmax() -> None:
    """Of log-probabilities in place of logits."""
    logits, _ = logits_and_labels(seed=5)
    logits = torch.log_softmax(logits, -1).requires_grad_()
    found = z_penalty(torch.logsumexp(logits, -1), MASK)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert float(found.detach().max()) < 1e-30
    assert float(gradient.abs().max()) < 1e-15


def test_z_penalty_needs_no_finite_logit_of_every_column() -> None:
    """Columns of a padded vocabulary, whose logits are -inf, change nothing."""
    logits, _ = logits_and_labels(seed=6)
    padded = torch.nn.functional.pad(logits, (0, 2), value=-torch.inf)
    found, expected = (z_penalty(torch.logsumexp(z, -1), MASK) for z in (padded, logits))
    assert torch.allclose(found, expected, rtol=1e-15)


@pytest.mark.parametrize("cap", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("std", [0.1, 1.0, 30.0, 1e3])
def test_softcap_by_mpmath(std: float, cap: float) -> None:
    """tanh(x) is (1 - e^-2x) / (1 + e^-2x), and the slope of the soft-cap is 1 / cosh(x)^2."""
    logits, _ = logits_and_labels(std, seed=7)
    logits.requires_grad_()
    found = softcapped(logits, cap)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    with mpmath.workdps(50):
        x = [mpmath.mpf(float(z)) / mpmath.mpf(cap) for z in logits.detach().flatten()]
        expected = [float(cap * (1 - mpmath.exp(-2 * v)) / (1 + mpmath.exp(-2 * v))) for v in x]
        slopes = [float(4 / (mpmath.exp(v) + mpmath.exp(-v)) ** 2) for v in x]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-14)
    assert gradient.flatten().tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-15)


def test_softcap_tends_to_the_logits_and_bounds_them() -> None:
    """What it takes from z is z^3 / (3 cap^2) for a large cap."""
    logits, _ = logits_and_labels(seed=8)
    lost = logits - softcapped(logits, 1e3)
    assert torch.allclose(lost, logits**3 / 3e6, rtol=1e-4, atol=1e-13)
    assert torch.equal(softcapped(logits * torch.inf, 2.0), 2.0 * logits.sign())
