# SPDX-License-Identifier: Apache-2.0
"""A number that float32 does not hold is rounded once in each run, wherever a loss writes it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.noise import Noise
from lossgate.numerics.round_every_operation import ERRORS, RoundEveryOperation, RoundNumbers

Operation = Callable[[Tensor], Tensor]

UNIT, RUNS, TOKENS = FLOAT32.unit, 64, 4000


def in_runs(operation: Operation, tokens: int = TOKENS) -> Tensor:
    """Returns the results ``[RUNS, TOKENS]`` of an operation on ones, and on nothing but them."""

    def one_run(x: Tensor, errors: Tensor) -> Tensor:
        with RoundNumbers(errors, rounding):
            return operation(x)

    noise = Noise(0)
    with RoundEveryOperation(noise, FLOAT32) as rounding:
        x = torch.ones(RUNS, tokens, dtype=torch.float64)
        return torch.vmap(one_run)(x, noise.uniform(torch.Size((RUNS, ERRORS))))


ROUNDED: dict[str, Operation] = {
    "x + 0.7": lambda x: x + 0.7,
    "0.7 + x": lambda x: 0.7 + x,
    "x - 0.7": lambda x: x - 0.7,
    "2.2 - x": lambda x: 2.2 - x,
    "x * 0.1": lambda x: x * 0.1,
    "0.1 * x": lambda x: 0.1 * x,
    "x / 0.1": lambda x: x / 0.1,
    "0.1 / x": lambda x: 0.1 / x,
    "power": lambda x: (x + 1) ** 1.3,
    "torch.pow": lambda x: torch.pow(x + 1, 1.3),
    "power of a number": lambda x: 1.3**x,
    "torch.mul": lambda x: torch.mul(x, 0.1),
    "method, by name": lambda x: x.mul(other=0.1),
    "where": lambda x: torch.where(x > 0, 0.1, x),
    "where, last": lambda x: torch.where(x > 2, x, 0.1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.1),
    "masked_fill, by name": lambda x: x.masked_fill(mask=x > 0, value=0.1),
    "clamp": lambda x: x.clamp(0.0, 0.1),
    "clamp, by name": lambda x: torch.clamp(x, min=1.1),
    "clip": lambda x: torch.clip(x, max=0.1),
    "clamp_min": lambda x: x.clamp_min(1.1),
    "clamp, all by name": lambda x: torch.clamp(input=x, max=0.1),
    "masked_fill, all by name": lambda x: torch.masked_fill(input=x, mask=x > 0, value=0.1),
    "full_like": lambda x: torch.full_like(x, 0.1),
    "full": lambda x: torch.full((TOKENS,), 0.1, dtype=x.dtype),
    "new_full": lambda x: x.new_full((TOKENS,), 0.1),
    "as many tokens as runs": lambda x: 0.1 * torch.ones(RUNS, dtype=x.dtype),
}
EXACT: dict[str, Operation] = {
    "0.5": lambda x: x * 0.5,
    "an int": lambda x: x * 3,
    "infinity": lambda x: torch.where(x > 0, x, float("-inf")),
    "a bool": lambda x: x * True,
    "clamp at numbers of float32": lambda x: x.clamp(0.25, 0.5),
    "float32": lambda x: (x.float() * 0.1).double() * 0,
    "0.1 twice": lambda x: 0.1 * x - 0.1 * x,
    "0.1 and -0.1": lambda x: 0.1 * x + x * -0.1,
    "by name": lambda x: torch.clamp(input=x, min=0.25),
    "integers": lambda x: (torch.arange(len(x)) + 0.1) * 0.0 * x,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_number_is_rounded_once_in_each_run(name: str) -> None:
    """Its error is that of all results in a run. The results' own errors average out."""
    plain = ROUNDED[name](torch.ones(TOKENS, dtype=torch.float64))
    of_runs = in_runs(ROUNDED[name]).mean(1) / plain.mean() - 1
    assert float(of_runs.abs().max()) > 0.1 * UNIT
    assert float(of_runs.abs().max()) < 2.5 * UNIT
    assert len(of_runs.unique()) > RUNS / 2


@pytest.mark.parametrize("name", EXACT)
def test_a_number_that_float32_holds_stays(name: str) -> None:
    plain = EXACT[name](torch.ones(TOKENS, dtype=torch.float64))
    found = in_runs(EXACT[name])
    assert float((found.mean(1) - plain.mean()).nan_to_num().abs().max()) < 0.1 * UNIT


def test_other_numbers_have_other_errors() -> None:
    difference = in_runs(lambda x: 0.1 * x - 0.3 * x / 3).mean(1)
    assert float(difference.abs().max()) > 0.02 * UNIT


@pytest.mark.parametrize("tokens", [RUNS - 1, RUNS, RUNS + 1])
def test_how_many_tokens_there_are_is_no_matter(tokens: int) -> None:
    """Integers, too, which a run shares with all others, stay what they are."""

    def weighted(x: Tensor) -> Tensor:
        return (0.1 * torch.arange(tokens)).to(x.dtype) * x + 0.1 * torch.arange(tokens, dtype=x.dtype)

    plain = weighted(torch.ones(tokens, dtype=torch.float64))
    found = in_runs(weighted, tokens)
    assert float((found - plain).abs().max()) < 4 * UNIT * tokens


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (1 - x.exp()) ** 1.3,
        lambda x: 1.3**x,
        lambda x: x.clamp(-0.7, 0.7),
        lambda x: F.softplus(x * 0.1),
        lambda x: F.leaky_relu(x, 0.1),
        lambda x: torch.add(x, x, alpha=0.1),
        lambda x: (x * x).mul_(0.1),
        lambda x: torch.where(x > -0.5, 0.1 * x, 0.3),
        lambda x: F.smooth_l1_loss(x, x.detach() * 1.1, beta=0.1, reduction="none"),
    ],
)
def test_gradients_are_off_by_rounding_alone(function: Operation) -> None:
    x = -torch.linspace(0.1, 2.0, 8, dtype=torch.float64).requires_grad_()
    (plain,) = torch.autograd.grad(function(x).sum(), x)

    def one_run(x: Tensor, errors: Tensor) -> Tensor:
        with RoundNumbers(errors, rounding):
            return function(x)

    noise, runs = Noise(0), x.detach().expand(RUNS, -1).clone().requires_grad_()
    with RoundEveryOperation(noise, FLOAT32) as rounding:
        values = torch.vmap(one_run)(runs, noise.uniform(torch.Size((RUNS, ERRORS))))
        (found,) = torch.autograd.grad(values.sum(), runs)
    assert torch.allclose(found, plain.expand(RUNS, -1), rtol=32 * UNIT, atol=32 * UNIT)
