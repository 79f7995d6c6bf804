# SPDX-License-Identifier: Apache-2.0
"""Each word of ``Precision`` is for kernels that exist: those agree that say it, and no others.

A GPU's products are computed here by hand: factors are cut to TF32, and partial sums are rounded
toward zero.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lossgate import Candidate, Outputs, Precision, candidate
from lossgate.cases.placement import sample_problems
from lossgate.inputs import NllHidden, TokenLogprobsHidden

from .checks import MakeWorld, run

Product = Callable[[Tensor, Tensor], Tensor]


def tf32(x: Tensor) -> Tensor:
    """Rounds float32 numbers to 10 bits after the point."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def in_tf32(a: Tensor, b: Tensor) -> Tensor:
    return tf32(a) @ tf32(b)


def toward_zero(x: Tensor) -> Tensor:
    """Cuts float64 numbers to the 24 bits of float32."""
    return (x.contiguous().view(torch.int64) & ~0x1FFFFFFF).view(torch.float64)


def truncated(a: Tensor, b: Tensor) -> Tensor:
    """Adds up four terms at a time, as tensor cores do."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for start in range(0, a.shape[1], 4):
        step = slice(start, start + 4)
        total = toward_zero(total + a[:, step].double() @ b[step].double())
    return total.float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, product: Product, rows: int | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.product, ctx.rows = product, rows
        return product(hidden.float(), weight.float().T)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        product, rows = ctx.product, ctx.rows or len(weight)
        grad_hidden = torch.zeros_like(hidden if ctx.rows else hidden.float())
        for start in range(0, len(weight), rows):
            tile = slice(start, start + rows)
            grad_hidden += product(upstream[:, tile].contiguous(), weight[tile].float()).to(grad_hidden.dtype)
        grad_weight = product(upstream.T.contiguous(), hidden.float())
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None


def nll(product: Product = torch.matmul, *, rows: int | None = None, dtype: str = "float32") -> Candidate:
    """Returns an NLL with products of its own.

    Args:
        product: computes them.
        rows: of the vocabulary, after which the gradient of the hidden states is added to a sum in
            the dtype of the inputs; None for all at once.
        dtype: of the inputs.
    """

    @candidate("nll", head="hidden", dtypes=(dtype,))
    def kernel(inputs: NllHidden, options: Any, mesh: Any) -> Outputs:
        logits = _Linear.apply(inputs.hidden, inputs.weight, product, rows)
        logprobs = logits.log_softmax(-1).gather(1, inputs.labels[:, None]).squeeze(1)  # pyright: ignore
        loss = -torch.where(inputs.mask, logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
        return Outputs(loss=loss, logprobs=logprobs)

    return kernel


@candidate("token_logprobs", head="hidden", dtypes=("bfloat16",), differentiable=("logprobs", "token_entropy"))
def coarse_entropy(inputs: TokenLogprobsHidden, options: Any, mesh: Any) -> Outputs:
    logprobs = (inputs.hidden.float() @ inputs.weight.float().T).log_softmax(-1)
    low = logprobs.bfloat16()
    entropy = -(low.exp() * low).sum(-1).float()
    return Outputs(logprobs=logprobs.gather(1, inputs.labels[:, None]).squeeze(1), token_entropy=entropy)


@candidate("nll", head="hidden", dtypes=("bfloat16",), precision=Precision(returned={"logprobs": "bfloat16"}))
def coarse_result(inputs: NllHidden, options: Any, mesh: Any) -> Outputs:
    logprobs = (inputs.hidden.float() @ inputs.weight.float().T).log_softmax(-1)
    own = logprobs.gather(1, inputs.labels[:, None]).squeeze(1)
    loss = -torch.where(inputs.mask, own, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
    return Outputs(loss=loss, logprobs=own.bfloat16())


SUMS = nll(rows=16, dtype="bfloat16")


def under_autocast(dtype: torch.dtype) -> Candidate:
    """Returns an NLL whose product is one of ``torch.autocast``, for float32 inputs."""

    @candidate("nll", head="hidden", dtypes=("float32",))
    def kernel(inputs: NllHidden, options: Any, mesh: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            logits = torch.nn.functional.linear(inputs.hidden, inputs.weight)
        nll = torch.nn.functional.cross_entropy(logits.float(), inputs.labels, reduction="none")
        return torch.where(inputs.mask, nll, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


def of_autocast(dtype: Any) -> Precision:
    return Precision(products=dtype, logits=dtype, dlogits=dtype)


KERNELS = {
    "bfloat16": (under_autocast(torch.bfloat16), of_autocast("bfloat16")),
    "float16": (under_autocast(torch.float16), of_autocast("float16")),
    "tf32": (nll(in_tf32), Precision(products="tf32")),
    "truncated": (nll(truncated), Precision(accumulators="truncated")),
    "entropy": (coarse_entropy, Precision(entropy="bfloat16")),
    "sums of the hidden gradient": (SUMS, Precision(accumulate_hidden="bfloat16", vocab_chunk=16)),
}


def verdicts(make_world: MakeWorld, kernel: Candidate, precision: Precision) -> list[bool]:
    (dtype,) = kernel.precision
    declared, world = replace(kernel, precision={dtype: precision}), make_world("single")
    problems = sample_problems(declared, world.layout, dtype, 25, seed=3)
    return [run(declared, problem, world).agrees for problem in problems]


@pytest.mark.parametrize("word", KERNELS)
def test_a_kernel_agrees_that_says_the_word(make_world: MakeWorld, word: str) -> None:
    assert all(verdicts(make_world, *KERNELS[word]))


@pytest.mark.parametrize("word", KERNELS)
def test_a_kernel_disagrees_that_does_not(make_world: MakeWorld, word: str) -> None:
    assert not all(verdicts(make_world, KERNELS[word][0], Precision()))


def test_an_output_may_be_returned_in_a_dtype_of_its_own(make_world: MakeWorld) -> None:
    assert all(verdicts(make_world, coarse_result, coarse_result.precision["bfloat16"]))


MIXED = {"loss": "float32", "logprobs": "bfloat16", "entropy": "bfloat16"}
"""Each returned in a dtype of its own, in the dtypes of two arithmetics."""


def in_dtypes(precision: Precision, *, rounded: bool = False) -> Candidate:
    """Returns an NLL whose loss is computed in the dtype that is declared, from log-probabilities
    in float32, and that returns each output as declared.

    Args:
        precision: what it declares.
        rounded: log-probabilities are rounded to bfloat16 before they are returned.
    """

    @candidate("nll", head="hidden", dtypes=("bfloat16",), precision=precision)
    def kernel(inputs: NllHidden, options: Any, mesh: Any) -> Outputs:
        every = (inputs.hidden.float() @ inputs.weight.float().T).log_softmax(-1)
        own = every.gather(1, inputs.labels[:, None]).squeeze(1)
        tokens, arithmetic = inputs.valid_tokens.clamp(min=1), getattr(torch, precision.loss)
        loss = -torch.where(inputs.mask, own.to(arithmetic), 0.0).sum() / tokens
        entropy = torch.where(inputs.mask, -(every.exp() * every).sum(-1), 0.0).sum() / tokens

        def returned(name: str, x: torch.Tensor) -> torch.Tensor:
            return x.to(getattr(torch, precision.dtype_of(name)))

        given = own.bfloat16() if rounded else own
        metrics = {"entropy": returned("entropy", entropy)}
        return Outputs(loss=returned("loss", loss), logprobs=returned("logprobs", given), metrics=metrics)

    return kernel


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("loss", ["float32", "bfloat16"])
@pytest.mark.parametrize("returned", [None, "float32", "bfloat16", MIXED, {"logprobs": "float32"}], ids=str)
def test_what_is_returned_hangs_not_on_the_arithmetic(make_world: MakeWorld, loss: str, returned: Any) -> None:
    precision = Precision(loss=loss, returned=returned)
    assert all(verdicts(make_world, in_dtypes(precision), precision))


@pytest.mark.parametrize("returned", ["float32", {"logprobs": "float32"}], ids=str)
def test_log_probabilities_are_not_excused_by_the_arithmetic_of_the_loss(make_world: MakeWorld, returned: Any) -> None:
    """They are said to be float32, and hold numbers of bfloat16: their own word says so."""
    precision = Precision(loss="bfloat16", returned=returned)
    rounded = in_dtypes(precision, rounded=True)
    assert not all(verdicts(make_world, rounded, precision))
    assert all(verdicts(make_world, rounded, replace(precision, logprobs="bfloat16")))


def test_a_loss_in_bfloat16_is_not_excused_by_what_is_returned(make_world: MakeWorld) -> None:
    """It is computed in float32, and only the log-probabilities are rounded at the end."""
    kernel = coarse_result.kernel

    @candidate("nll", head="hidden", dtypes=("bfloat16",))
    def sums_in_bfloat16(inputs: NllHidden, options: Any, mesh: Any) -> Outputs:
        outputs: Outputs = kernel(inputs, options, mesh)
        loss = -torch.where(inputs.mask, outputs.logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)  # pyright: ignore
        return replace(outputs, loss=loss.float())

    assert not all(verdicts(make_world, sums_in_bfloat16, coarse_result.precision["bfloat16"]))
