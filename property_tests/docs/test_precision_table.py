# SPDX-License-Identifier: Apache-2.0
"""The table of precisions in candidate.md: kernels that are written so agree with what it declares,
and disagree with less.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lossgate
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES

from .markdown import ROOT

SIZE = 8
"""The tokens of a chunk, as in the table."""


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def in_chunks(inputs: Any, losses: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    parts = zip(inputs.hidden.split(SIZE), inputs.labels.split(SIZE), strict=True)
    return torch.cat([losses(hidden, labels) for hidden, labels in parts])


def product(inputs: Any) -> Tensor:
    return losses_of((inputs.hidden @ inputs.weight.T).float(), inputs.labels)


def product_in_a_loop(inputs: Any) -> Tensor:
    return in_chunks(inputs, lambda hidden, labels: losses_of((hidden @ inputs.weight.T).float(), labels))


def product_in_float32(inputs: Any) -> Tensor:
    return losses_of(inputs.hidden.float() @ inputs.weight.float().T, inputs.labels)


def cast_before_the_loop(inputs: Any) -> Tensor:
    weight = inputs.weight.float()
    return in_chunks(inputs, lambda hidden, labels: losses_of(hidden.float() @ weight.T, labels))


def cast_in_the_loop(inputs: Any) -> Tensor:
    return in_chunks(inputs, lambda hidden, labels: losses_of(hidden.float() @ inputs.weight.float().T, labels))


def all_in_bfloat16(inputs: Any) -> Tensor:
    return losses_of(inputs.hidden @ inputs.weight.T, inputs.labels)


class InForward(torch.autograd.Function):
    """The mean loss of trained tokens, whose gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, inputs: Any, sum_dtype: torch.dtype) -> Tensor:
        """Returns the loss. The gradient of the weight is added up in ``sum_dtype``."""
        count = inputs.valid_tokens.clamp(min=1)
        total, of_hidden, of_weight = (
            torch.zeros(()),
            torch.zeros_like(hidden),
            torch.zeros_like(weight, dtype=sum_dtype),
        )
        for start in range(0, len(hidden), SIZE):
            part = slice(start, start + SIZE)
            labels, mask = inputs.labels[part, None], inputs.mask[part, None]
            logprobs = (hidden[part] @ weight.T).float().log_softmax(-1)
            total -= torch.where(mask, logprobs.gather(-1, labels), 0.0).sum()
            of_logits = logprobs.exp().scatter_add(-1, labels, -torch.ones_like(labels, dtype=torch.float32))
            of_logits = (torch.where(mask, of_logits, 0.0) / count).to(hidden.dtype)
            of_hidden[part] = of_logits @ weight
            of_weight += of_logits.T @ hidden[part]
        ctx.save_for_backward(of_hidden, of_weight.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Multiplies the gradients by that of the loss."""
        return *(upstream[0] * gradient for gradient in ctx.saved_tensors), None, None


def in_forward(inputs: Any) -> Tensor:
    return InForward.apply(inputs.hidden, inputs.weight, inputs, torch.float32)


def in_forward_with_a_coarse_sum(inputs: Any) -> Tensor:
    return InForward.apply(inputs.hidden, inputs.weight, inputs, inputs.weight.dtype)


KERNELS = (
    product,
    product_in_a_loop,
    product_in_float32,
    cast_before_the_loop,
    cast_in_the_loop,
    all_in_bfloat16,
    in_forward,
    in_forward_with_a_coarse_sum,
)


def rows() -> list[lossgate.Precision]:
    """Returns the precision in each row of the table."""
    text = (ROOT / "docs/how-to/candidate.md").read_text()
    (table,) = re.findall(r"^\| the kernel computes \|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    declared: Sequence[str] = re.findall(r"\| `(Precision\([^`]*\))`", table)
    return [eval(one, {"Precision": lossgate.Precision, "BF16": "bfloat16"}) for one in declared]


def verdict(losses: Callable[[Any], Tensor], precision: lossgate.Precision) -> Verdict:
    @lossgate.candidate("nll", head="hidden", dtypes=("bfloat16",), precision=precision, name=losses.__name__)
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        found = losses(inputs)
        if not found.dim():
            return found
        return torch.where(inputs.mask, found, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return run_cell(Cell(kernel, lossgate.Layout(), "bfloat16"), PROFILES["dev"]).verdict


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("losses", "precision"), list(zip(KERNELS, rows(), strict=True)), ids=lambda x: getattr(x, "__name__", "")
)
def test_kernels_agree_with_what_the_table_declares(losses: Any, precision: lossgate.Precision) -> None:
    assert verdict(losses, precision) is Verdict.AGREE


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("losses", [product, product_in_a_loop, cast_in_the_loop, all_in_bfloat16, in_forward])
def test_kernels_that_declare_nothing_disagree(losses: Any) -> None:
    assert verdict(losses, lossgate.Precision()) is Verdict.DISAGREE


@pytest.mark.slow
def test_a_loop_must_declare_its_sums() -> None:
    without = lossgate.Precision(logits="bfloat16", dlogits="bfloat16")
    assert verdict(product_in_a_loop, without) is Verdict.DISAGREE
    assert verdict(in_forward_with_a_coarse_sum, replace(without, grads_in_forward=True)) is Verdict.DISAGREE
