# SPDX-License-Identifier: Apache-2.0
"""Tests of the reference of ``nll``.

The methods are closed forms, mpmath, hand computation and properties.
"""

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dense_losses import linear_logits, mean_entropy, nll, token_entropy, token_logprobs
from dense_losses.nll import sequence_nll

TOKENS, WIDTH, VOCAB = 5, 3, 7


def example(seed: int = 0, weight_std: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([True, False, True, True, False])
    return {
        "hidden": torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64),
        "weight": torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64) * weight_std,
        "bias": torch.randn(VOCAB, generator=generator, dtype=torch.float64),
        "labels": torch.randint(VOCAB, (TOKENS,), generator=generator),
        "mask": mask,
        "valid_tokens": mask.sum(),
    }


def loss_of(
    e: dict[str, Tensor], hidden: Tensor, weight: Tensor, bias: Tensor, temperature: float, reduction: str
) -> Tensor:
    logprobs = token_logprobs(linear_logits(hidden, weight, bias), e["labels"], temperature)
    return nll(logprobs, e["mask"], e["valid_tokens"], reduction)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_gradients_by_a_closed_form(reduction: str, temperature: float) -> None:
    """Compares with dL/dz = (p - onehot) m / (N tau), where p is a quotient of exponentials."""
    e = example(seed=1)
    hidden, weight, bias = (e[name].requires_grad_() for name in ("hidden", "weight", "bias"))
    found = torch.autograd.grad(loss_of(e, hidden, weight, bias, temperature, reduction), (hidden, weight, bias))
    with torch.no_grad():
        exps = ((hidden @ weight.T + bias) / temperature).exp()
        p = exps / exps.sum(1, keepdim=True)
        scale = e["mask"].double() / temperature / (e["valid_tokens"] if reduction == "mean" else 1)
        dlogits = (p - torch.eye(VOCAB, dtype=torch.float64)[e["labels"]]) * scale[:, None]
        derived = (dlogits @ weight, dlogits.T @ hidden, dlogits.sum(0))
    for a, b in zip(found, derived, strict=True):
        assert (a - b).norm() <= 1e-14 * b.norm()


@pytest.mark.parametrize("weight_std", [0.1, 1.0, 30.0, 1e3])
def test_value_by_mpmath(weight_std: float) -> None:
    """Compares with fifty digits, computed from exactly the same inputs."""
    e, tau = example(seed=2, weight_std=weight_std), 0.7
    logits = linear_logits(e["hidden"], e["weight"])
    with mpmath.workdps(50):
        total, entropies = mpmath.mpf(0), []
        for t in range(TOKENS):
            z = [
                sum(mpmath.mpf(float(h)) * mpmath.mpf(float(w)) for h, w in zip(e["hidden"][t], row, strict=True)) / tau
                for row in e["weight"]
            ]
            normaliser = sum(mpmath.exp(x) for x in z)
            p = [mpmath.exp(x) / normaliser for x in z]
            entropies.append(float(-sum(q * mpmath.log(q) for q in p if q)))
            if e["mask"][t]:
                total -= z[int(e["labels"][t])] - mpmath.log(normaliser)
        expected = float(total / int(e["valid_tokens"]))
    found = nll(token_logprobs(logits, e["labels"], tau), e["mask"], e["valid_tokens"])
    assert float(found) == pytest.approx(expected, rel=1e-12)
    assert token_entropy(logits, tau).tolist() == pytest.approx(entropies, rel=1e-9, abs=1e-12 * weight_std)


def test_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64)
    mask = torch.tensor([True, False, True])
    assert nll(logprobs, mask, torch.tensor(2)) == 2.5
    assert nll(logprobs, mask, torch.tensor(10)) == 0.5  # two of the ten trained tokens of the batch
    assert nll(logprobs, mask, torch.tensor(2), "sum") == 5.0
    assert mean_entropy(-logprobs, mask, torch.tensor(2)) == 2.5


@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e-5])
def test_epsilon_is_added_to_the_count(epsilon: float) -> None:
    """NeMo-RL adds 1e-8 and AReaL 1e-5, which lowers the loss of a batch of one token by 1e-5."""
    logprobs, mask = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True), torch.tensor([True, True])
    loss = nll(logprobs, mask, torch.tensor(1), epsilon=epsilon)
    assert float(loss.detach()) == pytest.approx(3 / (1 + epsilon), rel=1e-15, abs=0)
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == pytest.approx([-1 / (1 + epsilon)] * 2, rel=1e-15, abs=0)
    assert nll(logprobs, mask, torch.tensor(1), "sum", epsilon) == 3  # epsilon has no effect on a sum
    assert nll(logprobs, ~mask, torch.tensor(0), epsilon=epsilon) == 0


SEQUENCE = torch.tensor([0, 0, 0, 1, 2, 2])
TRAINED = torch.tensor([True, False, True, True, False, False])  # the last sequence has no trained token


@pytest.mark.parametrize(("average", "expected"), [(False, [5, 3, 0]), (True, [2.5, 3, 0])])
def test_loss_of_each_sequence_by_hand(average: bool, expected: list[float]) -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -3.0, -7.0, -8.0], dtype=torch.float64)
    assert sequence_nll(logprobs, TRAINED, SEQUENCE, 3, average).tolist() == expected
    order = torch.tensor([4, 5, 3, 0, 1, 2])
    assert sequence_nll(logprobs[order], TRAINED[order], SEQUENCE[order], 3, average).tolist() == expected


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf"), float("-inf")])
def test_gradient_of_the_loss_of_each_sequence(average: bool, garbage: float) -> None:
    """The gradient is -m_t, divided by the trained tokens of the sequence for the average.

    Garbage at masked tokens has no effect. vmap takes the gradient of one sequence at a time.
    """
    logprobs = torch.where(TRAINED, -torch.rand(6, dtype=torch.float64), garbage)
    values, back = torch.func.vjp(lambda x: sequence_nll(x, TRAINED, SEQUENCE, 3, average), logprobs)
    assert values.isfinite().all()
    (gradients,) = torch.func.vmap(back)(torch.eye(3, dtype=torch.float64))
    first = -0.5 if average else -1.0
    assert gradients.tolist() == [[first, 0, first, 0, 0, 0], [0, 0, 0, -1, 0, 0], [0, 0, 0, 0, 0, 0]]


def test_losses_of_sequences_add_up_to_the_loss_of_the_batch() -> None:
    logprobs = -torch.rand(6, dtype=torch.float64)
    assert float(sequence_nll(logprobs, TRAINED, SEQUENCE, 3).sum()) == pytest.approx(
        float(nll(logprobs, TRAINED, torch.tensor(3), "sum")), rel=1e-15
    )
    many = torch.stack([logprobs, logprobs * 2])
    assert torch.equal(
        torch.func.vmap(lambda x: sequence_nll(x, TRAINED, SEQUENCE, 3))(many)[1],
        sequence_nll(many[1], TRAINED, SEQUENCE, 3),
    )


def test_equal_logits_have_the_log_of_the_vocabulary_size_as_entropy() -> None:
    assert float(token_entropy(torch.zeros(1, 8, dtype=torch.float64))) == pytest.approx(
        3 * torch.tensor(2.0, dtype=torch.float64).log().item()
    )


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3.0), st.floats(-50, 50))
def test_a_constant_added_to_a_row_of_logits_changes_nothing(seed: int, temperature: float, constant: float) -> None:
    e = example(seed)
    logits = linear_logits(e["hidden"], e["weight"])
    before, after = (token_logprobs(z, e["labels"], temperature) for z in (logits, logits + constant))
    assert (before - after).abs().max() < 1e-12


@given(st.integers(0, 2**32 - 1), st.floats(0.3, 3.0))
def test_temperature_divides_the_hidden_states_as_well(seed: int, temperature: float) -> None:
    e = example(seed)
    left = token_logprobs(linear_logits(e["hidden"], e["weight"]), e["labels"], temperature)
    right = token_logprobs(linear_logits(e["hidden"] / temperature, e["weight"]), e["labels"])
    assert (left - right).abs().max() < 1e-12


def test_probabilities_sum_to_one_at_any_temperature() -> None:
    logits = linear_logits(example()["hidden"], example()["weight"])
    for temperature in (0.3, 1.0, 3.0):
        p = torch.stack([token_logprobs(logits, torch.full((TOKENS,), v), temperature).exp() for v in range(VOCAB)])
        assert (p.sum(0) - 1).abs().max() < 1e-14


def test_shapes_are_checked() -> None:
    """The test run checks the shapes in the annotations."""
    with pytest.raises(Exception, match="labels"):
        token_logprobs(torch.zeros(3, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.long))
