# SPDX-License-Identifier: Apache-2.0
"""Tests of the references of filtered log-probabilities.

The methods are a closed form, sorting as in the originals, hand computation and
properties.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dense_losses import nll, token_entropy, token_logprobs
from dense_losses.filtering import filtered_token_entropy, filtered_token_logprobs, kept_tokens

TOKENS, VOCAB, TAU = 5, 7, 0.7

SETTINGS: list[tuple[int | None, float]] = [
    (None, 1.0),
    (3, 1.0),
    (1, 1.0),
    (None, 0.8),
    (None, 0.3),
    (4, 0.7),
    (VOCAB, 0.9),
    (VOCAB + 5, 0.6),
]
every_setting = pytest.mark.parametrize(("top_k", "top_p"), SETTINGS)
few = settings(max_examples=50, deadline=None)
seeds, ks, ps = st.integers(0, 2**32 - 1), st.none() | st.integers(1, VOCAB + 1), st.floats(0.05, 1.0)


def logits_of(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def kept_by_sorting(tempered: Tensor, top_k: int | None, top_p: float) -> np.ndarray:
    """Filters as vLLM, NeMo-RL and Hugging Face do.

    They sort upwards, drop what is below the k-th, then what the nucleus does not need.
    """
    z = tempered.numpy()
    order = z.argsort(axis=-1, kind="stable")
    ordered = np.take_along_axis(z, order, -1)
    keep = np.ones_like(ordered, dtype=bool)
    if top_k is not None and top_k < z.shape[-1]:
        keep &= ordered >= ordered[:, [z.shape[-1] - top_k]]
    p = np.where(keep, np.exp(ordered - ordered[:, -1:]), 0)
    if top_p < 1:
        keep &= np.cumsum(p / p.sum(-1, keepdims=True), -1) > 1 - top_p
    keep[:, -1] = True
    result = np.empty_like(keep)
    np.put_along_axis(result, order, keep, -1)
    return result


def by_hand(z: Tensor, top_k: int | None, top_p: float, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens that pass, and all probabilities as quotients of exponentials.

    The probability of a filtered token is 0.
    """
    keep = kept_by_sorting(z / temperature, top_k, top_p)
    exps = np.where(keep, np.exp(z.numpy() / temperature), 0)
    return keep, exps / exps.sum(-1, keepdims=True)


@few
@given(seeds, ks, ps, st.floats(0.3, 3.0))
def test_values_and_gradients_by_sorting_and_a_closed_form(
    seed: int, top_k: int | None, top_p: float, temperature: float
) -> None:
    """d log p(y)/dz = (onehot - p) / tau and dH/dz = -p (log p + H) / tau, over passing tokens."""
    z = logits_of(seed).requires_grad_()
    keep, p = by_hand(z.detach(), top_k, top_p, temperature)
    assert np.array_equal(kept_tokens(z / temperature, top_k, top_p).numpy(), keep)
    logp = np.log(p, out=np.zeros_like(p), where=keep)
    entropy = filtered_token_entropy(z, temperature, top_k, top_p)
    h = -(p * logp).sum(-1)
    assert np.allclose(entropy.detach(), h, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(entropy.sum(), z)
    assert np.allclose(gradient, -p * (logp + h[:, None]) / temperature, rtol=1e-10, atol=1e-14)
    for label in range(VOCAB):
        found = filtered_token_logprobs(z, torch.full((TOKENS,), label), temperature, top_k, top_p)
        assert np.allclose(found.detach(), np.where(keep[:, label], logp[:, label], -np.inf), rtol=1e-12, atol=1e-14)
        (gradient,) = torch.autograd.grad(found.sum(), z)
        expected = keep[:, [label]] * (np.eye(VOCAB)[label] - p) / temperature
        assert np.allclose(gradient, expected, rtol=1e-12, atol=1e-14)
        assert not gradient.numpy()[~keep].any()


@pytest.mark.parametrize("top_k", [None, VOCAB, VOCAB + 1])
@pytest.mark.parametrize("temperature", [1.0, TAU])
def test_without_a_filter_it_equals_the_unfiltered_reference(top_k: int | None, temperature: float) -> None:
    # The factor makes rows so peaked that the sum of all probabilities but the last few is 1.
    z, labels = logits_of() * 20, torch.arange(TOKENS)
    assert torch.equal(
        filtered_token_logprobs(z, labels, temperature, top_k, 1.0), token_logprobs(z, labels, temperature)
    )
    assert torch.equal(filtered_token_entropy(z, temperature, top_k, 1.0), token_entropy(z, temperature))


@pytest.mark.parametrize(
    ("probabilities", "temperature", "top_k", "top_p", "expected"),
    [
        # expected probabilities, 0 for filtered tokens
        ((0.4, 0.3, 0.2, 0.1), 1.0, 2, 1.0, (4 / 7, 3 / 7, 0, 0)),
        ((0.1, 0.2, 0.3, 0.4), 1.0, 3, 1.0, (0, 2 / 9, 3 / 9, 4 / 9)),
        ((0.4, 0.3, 0.2, 0.1), 1.0, 1, 1.0, (1, 0, 0, 0)),
        ((0.4, 0.3, 0.2, 0.1), 1.0, None, 0.69, (4 / 7, 3 / 7, 0, 0)),
        ((0.4, 0.3, 0.2, 0.1), 1.0, None, 0.71, (4 / 9, 3 / 9, 2 / 9, 0)),
        ((0.4, 0.3, 0.2, 0.1), 1.0, None, 1e-6, (1, 0, 0, 0)),  # the most probable token always passes
        ((0.4, 0.3, 0.2, 0.1), 1.0, None, 1.0, (0.4, 0.3, 0.2, 0.1)),
        # top-p applies to what passed top-k, renormalised: the mass above token 1 is 4/7, not 0.4
        ((0.4, 0.3, 0.2, 0.1), 1.0, 2, 0.5, (1, 0, 0, 0)),
        ((0.4, 0.3, 0.2, 0.1), 1.0, None, 0.5, (4 / 7, 3 / 7, 0, 0)),
        # the temperature comes first: 1/2 squares the odds to 16 : 9 : 4 : 1, the first above 0.5
        ((0.4, 0.3, 0.2, 0.1), 0.5, None, 0.5, (1, 0, 0, 0)),
        ((0.4, 0.3, 0.2, 0.1), 0.5, 2, 1.0, (16 / 25, 9 / 25, 0, 0)),
        # ties pass as one: at the k-th, and at the edge of the nucleus
        # (a sort would pass one of the four)
        ((0.5, 0.2, 0.2, 0.1), 1.0, 2, 1.0, (5 / 9, 2 / 9, 2 / 9, 0)),
        ((0.5, 0.125, 0.125, 0.125, 0.125), 1.0, None, 0.6, (0.5, 0.125, 0.125, 0.125, 0.125)),
        ((0.25, 0.25, 0.25, 0.25), 1.0, None, 0.1, (0.25, 0.25, 0.25, 0.25)),
        # a mass of exactly top_p above a token filters it
        ((0.5, 0.25, 0.125, 0.125), 1.0, None, 0.75, (2 / 3, 1 / 3, 0, 0)),
        # a padded vocabulary never passes
        ((0.5, 0.5, 0.0, 0.0), 1.0, 3, 1.0, (0.5, 0.5, 0, 0)),
        ((0.6, 0.4, 0.0, 0.0), 1.0, None, 1.0, (0.6, 0.4, 0, 0)),
        ((0.6, 0.4, 0.0, 0.0), 1.0, None, 0.99, (0.6, 0.4, 0, 0)),
    ],
)
def test_by_hand(
    probabilities: tuple[float, ...], temperature: float, top_k: int | None, top_p: float, expected: tuple[float, ...]
) -> None:
    z = of(*probabilities).requires_grad_()
    found = torch.cat(
        [filtered_token_logprobs(z, torch.tensor([v]), temperature, top_k, top_p) for v in range(len(probabilities))]
    )
    assert found.exp().detach().tolist() == pytest.approx(expected, rel=1e-13, abs=0)
    entropy = filtered_token_entropy(z, temperature, top_k, top_p)
    assert float(entropy.detach()) == pytest.approx(
        -math.fsum(p * math.log(p) for p in expected if p), rel=1e-13, abs=1e-15
    )
    for output in (found, entropy):
        assert torch.autograd.grad(output.sum(), z, retain_graph=True)[0].isfinite().all()


@pytest.mark.parametrize(
    ("option", "before", "after"),
    [("temperature", 1.0, 0.9), ("top_k", None, 3), ("top_k", 3, 2), ("top_p", 1.0, 0.6), ("top_p", 0.9, 0.5)],
)
def test_every_option_has_an_effect(option: str, before: Any, after: Any) -> None:
    z, labels = logits_of(), logits_of().argmax(-1)
    for function in (lambda **o: filtered_token_logprobs(z, labels, **o), lambda **o: filtered_token_entropy(z, **o)):
        assert (function(**{option: before}) - function(**{option: after})).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("option", "value"), [("top_k", 0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan)]
)
def test_invalid_options_are_rejected(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}; expected"):
        filtered_token_entropy(logits_of(), **{option: value})


@few
@given(seeds, ks, ps, st.floats(-50, 50))
def test_a_constant_added_to_a_row_of_logits_changes_nothing(
    seed: int, top_k: int | None, top_p: float, constant: float
) -> None:
    z, labels = logits_of(seed), torch.arange(TOKENS)
    before, after = (filtered_token_logprobs(x, labels, TAU, top_k, top_p) for x in (z, z + constant))
    assert torch.allclose(before, after, rtol=0, atol=1e-12)
    before, after = (filtered_token_entropy(x, TAU, top_k, top_p) for x in (z, z + constant))
    assert torch.allclose(before, after, rtol=0, atol=1e-12)


@few
@given(seeds, ks, ps)
def test_a_permutation_of_the_vocabulary_permutes_the_result(seed: int, top_k: int | None, top_p: float) -> None:
    """Logits are rounded to integers, so that there are ties."""
    z, order = logits_of(seed).round(), torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(kept_tokens(z, top_k, top_p)[:, order], kept_tokens(z[:, order], top_k, top_p))


@few
@given(seeds, st.integers(1, VOCAB - 1), ps)
def test_tighter_filters_give_distributions_over_fewer_tokens(seed: int, top_k: int, top_p: float) -> None:
    z = logits_of(seed)
    logprobs = torch.stack(
        [filtered_token_logprobs(z, torch.full((TOKENS,), v), TAU, top_k, top_p) for v in range(VOCAB)], -1
    )
    keep, plain = kept_tokens(z / TAU, top_k, top_p), torch.log_softmax(z / TAU, -1)
    assert (logprobs.exp().sum(-1) - 1).abs().max() < 1e-14
    assert torch.equal(logprobs > -math.inf, keep)
    assert (logprobs >= plain - 1e-14)[keep].all()
    assert keep.gather(-1, z.argmax(-1, keepdim=True)).all()
    for fewer in (kept_tokens(z / TAU, max(1, top_k - 1), top_p), kept_tokens(z / TAU, top_k, top_p * 0.8)):
        assert not (fewer & ~keep).any()


def test_a_filtered_label_that_is_masked_has_no_effect() -> None:
    z = torch.cat([of(0.6, 0.4), of(0.6, 0.4)]).requires_grad_()
    logprobs = filtered_token_logprobs(z, torch.tensor([0, 1]), top_k=1)
    assert logprobs.tolist() == [0, -math.inf]
    loss = nll(logprobs, logprobs > -math.inf, torch.tensor(1))
    loss.backward()
    assert loss == 0
    assert z.grad is not None
    assert not z.grad.any()


@every_setting
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_a_row_stays_in_it(top_k: int | None, top_p: float, garbage: float) -> None:
    z, labels = logits_of(), logits_of().argmax(-1)
    others = torch.arange(TOKENS) != 2
    dirty = torch.where(others[:, None], z, garbage).requires_grad_()
    loss = nll(filtered_token_logprobs(dirty, labels, TAU, top_k, top_p), others, torch.tensor(4))
    clean = nll(filtered_token_logprobs(z.requires_grad_(), labels, TAU, top_k, top_p), others, torch.tensor(4))
    assert loss == clean
    gradient, expected = torch.autograd.grad(loss, dirty)[0], torch.autograd.grad(clean, z)[0]
    assert torch.equal(gradient[others], expected[others])


@every_setting
def test_under_vmap_and_vjp(top_k: int | None, top_p: float) -> None:
    many, labels = torch.stack([logits_of(seed) for seed in range(3)]), torch.arange(TOKENS)
    for function in (
        lambda z: filtered_token_logprobs(z, labels, TAU, top_k, top_p),
        lambda z: filtered_token_entropy(z, TAU, top_k, top_p),
    ):
        values, back = torch.func.vjp(torch.func.vmap(function), many)
        (gradients,) = back(torch.ones_like(values))
        for z, value, gradient in zip(many, values, gradients, strict=True):
            expected, single_back = torch.func.vjp(function, z)
            assert torch.allclose(value, expected, rtol=1e-14, atol=1e-15)
            assert torch.allclose(gradient, single_back(torch.ones_like(expected))[0], rtol=0, atol=1e-14)
