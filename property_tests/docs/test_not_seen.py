# SPDX-License-Identifier: Apache-2.0
"""adequacy.md says what the judge does not see, and what it wrongly rejects."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bank.bugs import Bug, on_inputs, scale_gradient
from kernel_bank.cross_entropy import STYLES, make
from kernel_bank.right import KERNELS
from lossgate import ANY, Layout, Outputs, Precision, candidate
from lossgate.declaration.candidate import Candidate
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings


def verified(kernel: Candidate, dtype: str) -> CellResult:
    return run_cell(Cell(kernel, Layout(), dtype), Settings(shrink_calls=0))


def too_large(kernel: Candidate, share: float) -> Candidate:
    """Returns a kernel whose gradient of the hidden states is too large by a share."""

    def scaled(inputs: Any, mesh: object) -> Any:
        return replace(inputs, hidden=scale_gradient(inputs.hidden, 1 + share))

    return Bug("dX too large", "the gradient of the hidden states is too large", on_inputs(scaled)).put_into(kernel)


@pytest.mark.parametrize(("dtype", "missed", "seen"), [("float32", 5e-8, 2e-6), ("bfloat16", 2e-5, 1e-2)])
def test_errors_below_what_is_detected_pass(dtype: str, missed: float, seen: float) -> None:
    right = make(STYLES[dtype][0])
    assert verified(too_large(right, missed), dtype).verdict is Verdict.AGREE
    assert verified(too_large(right, seen), dtype).verdict is Verdict.DISAGREE


def capped_nll(tanh: Any) -> Candidate:
    @candidate("softcap", head="logits", dtypes=("float32",), supports={"softcap": ANY})
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        capped = options.softcap * tanh(inputs.logits / options.softcap)
        nll = F.cross_entropy(capped, inputs.labels, reduction="none")
        return torch.where(inputs.mask, nll, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


def test_a_formula_that_cancels_is_rejected_in_float32() -> None:
    assert verified(capped_nll(torch.tanh), "float32").verdict is Verdict.AGREE
    assert verified(capped_nll(lambda x: 2 * torch.sigmoid(2 * x) - 1), "float32").verdict is Verdict.DISAGREE


@candidate("nll", head="logprobs", dtypes=("bfloat16",), precision=Precision(loss="bfloat16"))
def summed(inputs: Any, options: Any, mesh: Any) -> Tensor:
    nll = torch.where(inputs.mask, -inputs.logprobs, 0.0)
    return nll.sum() / inputs.valid_tokens.clamp(min=1)


@candidate("nll", head="logprobs", dtypes=("bfloat16",), precision=Precision(loss="bfloat16"))
def summed_in_bfloat16(inputs: Any, options: Any, mesh: Any) -> Tensor:
    nll = torch.where(inputs.mask, -inputs.logprobs, 0.0)
    sums = nll.new_zeros(1).index_add(0, torch.zeros_like(inputs.labels), nll)
    return sums.sum() / inputs.valid_tokens.clamp(min=1)


def test_a_loss_in_bfloat16_that_adds_up_term_by_term_is_rejected() -> None:
    assert verified(summed, "bfloat16").verdict is Verdict.AGREE
    assert verified(summed_in_bfloat16, "bfloat16").verdict is Verdict.DISAGREE


def filtered(*, logits: str) -> Candidate:
    """Returns a kernel whose logits are rounded to a dtype, which it declares."""

    @candidate(
        "token_logprobs",
        head="hidden",
        dtypes=("float32", "bfloat16"),
        precision=Precision(logits=logits),
        supports={"top_k": (3,)},
    )
    def kernel(inputs: Any, options: Any, mesh: Any) -> Outputs:
        exact = inputs.hidden.float() @ inputs.weight.float().T
        rounded = exact + (exact.to(getattr(torch, logits)).float() - exact).detach()
        least = rounded.topk(min(options.top_k, rounded.shape[1]), 1).values[:, -1:]
        kept = rounded.masked_fill(rounded < least, -torch.inf)
        logprobs = torch.log_softmax(kept, 1).gather(1, inputs.labels[:, None]).squeeze(1)
        return Outputs(logprobs=logprobs.masked_fill(logprobs.isinf(), -torch.inf))

    return kernel


def test_logits_in_fp8_are_rejected() -> None:
    @candidate("nll", head="logits", dtypes=("bfloat16",), precision=Precision(logits="bfloat16"))
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        logits = inputs.logits.float()
        rounded = logits + (logits.to(torch.float8_e4m3fn).float() - logits).detach()
        nll = F.cross_entropy(rounded, inputs.labels, reduction="none")
        return torch.where(inputs.mask, nll, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    assert verified(kernel, "bfloat16").verdict is Verdict.DISAGREE


@pytest.mark.slow
def test_a_loss_in_bfloat16_may_need_more_problems() -> None:
    kernel = KERNELS["divergence_logits_by_torch_low"]
    few, more = (run_cell(Cell(kernel, Layout(), "bfloat16"), Settings(shrink_calls=0, examples=n)) for n in (10, 40))
    assert few.verdict is Verdict.INCONCLUSIVE
    silent = re.search(r"in (\d+) of (\d+) problems rounding explains", few.reasons[0])
    assert silent
    assert 40 <= int(silent[2]) <= 60
    assert 1 / 4 < int(silent[1]) / int(silent[2]) < 1 / 2
    assert "raise --examples to about" in few.reasons[0]
    assert more.verdict is Verdict.AGREE


def test_logits_may_be_coarser_than_the_inputs_of_a_filter() -> None:
    for dtype in ("float32", "bfloat16"):
        assert verified(filtered(logits="bfloat16"), dtype).verdict is Verdict.AGREE
