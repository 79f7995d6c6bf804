# SPDX-License-Identifier: Apache-2.0
"""Tests that gradients stay in the range of float16 on their way, if they end in it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fused_losses import Metrics, linear_cross_entropy, linear_logprobs, tiled_loss

LossOfLogprobs = Callable[[Tensor], Tensor]
Kernel = Callable[[Tensor, Tensor, Tensor, LossOfLogprobs], Tensor]


def one_pass(hidden: Tensor, weight: Tensor, labels: Tensor, loss: LossOfLogprobs, **given: float) -> Tensor:
    """Computes the loss with gradients made in forward, and hands the weight's on to its leaf."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = nn.Parameter(weight)
    head.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(weight, "grad", parameter.grad))
    return tiled_loss(head, hidden, labels, lambda found, _: (loss(found.logprobs), Metrics()), tiles=1, **given)[0]


def two_passes(hidden: Tensor, weight: Tensor, labels: Tensor, loss: LossOfLogprobs) -> Tensor:
    return loss(linear_logprobs(hidden, weight, labels).logprobs)


def example(tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns hidden states and a weight, the same in float64, and labels."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(n, 4, generator=generator).to(dtype).requires_grad_() for n in (tokens, 9)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    return leaves, exact, torch.randint(9, (tokens,), generator=generator)


def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.log_softmax(hidden @ weight.T / temperature, 1).gather(1, labels[:, None]).squeeze(1)


def gradients_of(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]


def test_small_losses_do_not_underflow() -> None:
    leaves, exact, labels = example(6, torch.float16)
    upstream = 2.0**-20 * torch.linspace(-1, 2, 6)
    logprobs(*exact, labels).backward(upstream.double())
    linear_logprobs(*leaves, labels).logprobs.backward(upstream)
    torch.testing.assert_close(gradients_of(leaves), gradients_of(exact), rtol=0.02, atol=2.0**-24)


@pytest.mark.parametrize("kernel", [one_pass, two_passes])
def test_a_sure_token_beside_large_gradients_does_not_underflow(kernel: Kernel) -> None:
    """Its logits have a gradient of 9e-4, which is 2e-7 of the largest upstream gradient."""
    factors, labels = torch.tensor([4000.0, 1.0]), torch.zeros(2, dtype=torch.long)
    leaves = [x.half().requires_grad_() for x in (torch.eye(2).flip(0), torch.tensor([[7.0, 0.0], [0.0, 0.0]]))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    (logprobs(*exact, labels) * factors).sum().backward()
    kernel(*leaves, labels, lambda found: (found * factors).sum()).backward()
    torch.testing.assert_close(gradients_of(leaves), gradients_of(exact), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("upstream", [1e3, 1e6])
@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_products_with_large_upstream_gradients_do_not_overflow(upstream: float, temperature: float) -> None:
    leaves, exact, labels = example(1024, torch.float32)
    (logprobs(*exact, labels, temperature).sum() * upstream).backward()
    given = {"matmul_dtype": torch.float16, "temperature": temperature, "chunk": 1024}
    (linear_logprobs(*leaves, labels, **given).logprobs.sum() * upstream).backward()
    for found, expected in zip(gradients_of(leaves), gradients_of(exact), strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_large_gradients_made_in_forward_do_not_overflow_before_backward_divides_them() -> None:
    leaves, exact, labels = example(3, torch.float16)
    logprobs(*exact, labels, 0.01).sum().backward()
    (one_pass(*leaves, labels, lambda found: 1e6 * found.sum(), temperature=0.01) / 1e6).backward()
    for found, expected in zip(gradients_of(leaves), gradients_of(exact), strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("kernel", ["in forward", "log-probabilities"])
def test_weight_gradients_of_many_like_tokens_do_not_overflow(kernel: str) -> None:
    """The sum over a chunk overflows float16; the mean does not."""
    hidden, weight = torch.full((1024, 8), 100.0).half(), torch.zeros(16, 8).half().requires_grad_()
    labels = torch.zeros(1024, dtype=torch.long)
    if kernel == "in forward":
        linear_cross_entropy(hidden, weight, labels, chunk=1024).backward()
    else:
        (-linear_logprobs(hidden, weight, labels, chunk=1024).logprobs.mean()).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0], torch.full((8,), -93.75).half(), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("outliers", [1, 1024])
def test_outliers_take_no_digits_from_other_gradients_of_the_weight(outliers: int) -> None:
    """In some tokens, hidden states have a channel that is thousands of times as large."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (scale * torch.randn(n, 16, generator=generator) for n, scale in ((1024, 0.3), (64, 0.1)))
    hidden[:outliers, 0], weight[:, 0] = 1000.0, 0.0
    labels = torch.randint(64, (1024,), generator=generator)
    leaves = [x.half().float().requires_grad_() for x in (hidden, weight)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    (4096 * logprobs(*exact, labels)).sum().backward()
    (4096 * linear_logprobs(*leaves, labels, matmul_dtype=torch.float16, chunk=1024).logprobs).sum().backward()
    found, expected = (gradients[1] for gradients in (gradients_of(leaves), gradients_of(exact)))
    errors = (found - expected).norm(dim=0) / expected.norm(dim=0)
    assert errors.max() < 5e-4
