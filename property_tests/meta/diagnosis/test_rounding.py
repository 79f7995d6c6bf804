# SPDX-License-Identifier: Apache-2.0
"""What a kernel rounds and does not declare is named, with what to declare."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossgate import ANY, Layout, Precision
from lossgate.declaration.candidate import Candidate, candidate
from lossgate.diagnosis.coarser_precision import Coarser, in_one_stage, in_several_stages
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.properties import PROPERTIES

BF16 = "bfloat16"
PRODUCT = {"logits": BF16, "dlogits": BF16}
SOFTMAX = {**PRODUCT, "logsumexp": BF16, "logprobs": BF16}
SIZE = 8
"""Tokens of a chunk."""


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def product(inputs: Any) -> Tensor:
    return losses_of((inputs.hidden @ inputs.weight.T).float(), inputs.labels)


def product_in_a_loop(inputs: Any) -> Tensor:
    parts = zip(inputs.hidden.split(SIZE), inputs.labels.split(SIZE), strict=True)
    return torch.cat([losses_of((hidden @ inputs.weight.T).float(), labels) for hidden, labels in parts])


def cast_in_the_loop(inputs: Any) -> Tensor:
    parts = zip(inputs.hidden.split(SIZE), inputs.labels.split(SIZE), strict=True)
    return torch.cat([losses_of(hidden.float() @ inputs.weight.float().T, labels) for hidden, labels in parts])


def softmax(inputs: Any) -> Tensor:
    return losses_of(inputs.hidden @ inputs.weight.T, inputs.labels).float()


def kernel_of(losses: Callable[[Any], Tensor], given: Mapping[str, Any], **options: Any) -> Candidate:
    @candidate("nll", head="hidden", dtypes=(BF16,), precision=Precision(**given), name=losses.__name__, **options)
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        return torch.where(inputs.mask, losses(inputs), 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


def judged(
    losses: Callable[[Any], Tensor], given: Mapping[str, Any], held_to: str = "agreement", seed: int = 0
) -> CellResult:
    cell = Cell(kernel_of(losses, given), Layout(), BF16, PROPERTIES[held_to])
    return run_cell(cell, Settings(shrink_calls=40, seed=seed))


def sentences(result: CellResult) -> tuple[str, ...]:
    assert result.verdict is Verdict.DISAGREE
    assert result.run.diagnosis is not None
    return result.run.diagnosis.sentences


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", [BF16, "float16"])
def test_factors_that_autocast_rounds_are_named_with_their_format(dtype: str) -> None:
    @candidate("nll", head="hidden", dtypes=("float32",))
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        with torch.autocast("cpu", getattr(torch, dtype)):
            logits = F.linear(inputs.hidden, inputs.weight)
        losses = losses_of(logits.float(), inputs.labels)
        return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    def verified(kernel: Candidate) -> CellResult:
        return run_cell(Cell(kernel, Layout(), "float32"), Settings(shrink_calls=0))

    cause, *_, todo = sentences(verified(kernel))
    assert f"the kernel rounds the factors of products to {dtype}, but" in cause
    assert f"declare for float32 Precision(products='{dtype}')" in todo
    declared: dict[str, Any] = {"products": dtype, "logits": dtype, "dlogits": dtype}
    right = replace(kernel, precision={"float32": Precision(**declared)})
    assert verified(right).verdict is Verdict.AGREE


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("losses", "given", "rounds", "declared"),
    [
        (product, {}, "the logits, or the sum over the vocabulary", PRODUCT),
        (product_in_a_loop, {}, "the logits, or the sum over the vocabulary", PRODUCT),
        # What is right already says that it is neither the logits nor the log-probabilities.
        (cast_in_the_loop, {}, "the running sum of the gradient of weight", {"accumulate": BF16, "chunk": 64}),
        (softmax, {}, "the sum over the vocabulary", SOFTMAX),
        # Problems of ordinary size agree, and those with some thousand tokens do not.
        (product_in_a_loop, PRODUCT, "the running sum of the gradient of weight", {"accumulate": BF16, "chunk": 32}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_rounded_is_named_with_what_to_declare(
    losses: Any, given: Mapping[str, Any], rounds: str, declared: Mapping[str, Any]
) -> None:
    cause, *_, todo = sentences(judged(losses, given))
    assert "the kernel rounds " in cause
    assert rounds in cause
    kernel = kernel_of(losses, given)
    assert Coarser(declared, "", BF16, "chunk" if "chunk" in declared else "").declared(kernel, BF16) in todo
    assert ("(logits=" in todo) == ("logits" in {**given, **declared})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_lost_chunk_is_not_taken_for_rounding(seed: int) -> None:
    """It shows only beyond 2,048 tokens. With 2,085, it is as small as rounding."""

    @candidate("nll", head="hidden", dtypes=("float32",))
    def lost(inputs: Any, options: Any, mesh: Any) -> Tensor:
        parts = zip(inputs.hidden.split(1024), inputs.labels.split(1024), strict=True)
        weights = [inputs.weight, inputs.weight, inputs.weight.detach()]  # the third chunk has none
        losses = [losses_of(hidden @ weights[min(n, 2)].T, labels) for n, (hidden, labels) in enumerate(parts)]
        return torch.where(inputs.mask, torch.cat(losses), 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    cause, *_ = sentences(run_cell(Cell(lost, Layout(), "float32"), Settings(shrink_calls=40, seed=seed)))
    assert re.fullmatch(r"cause: none of \d+ known mistakes explains it", cause)


@pytest.mark.slow
def test_a_step_that_is_declared_too_long_is_said() -> None:
    cause, *_, todo = sentences(judged(cast_in_the_loop, {"accumulate": BF16, "chunk": 128}))
    assert "the running sum of the gradient of weight after fewer tokens" in cause
    assert "Precision(accumulate='bfloat16', chunk=N), where N is the number of tokens in a step of its loop, " in todo


def test_the_tile_is_the_step_if_it_is_declared() -> None:
    kernel = kernel_of(cast_in_the_loop, {}, tiles={"token": SIZE})
    sums = [one.changes for one in in_one_stage(kernel, BF16) if "accumulate" in one.changes]
    assert sums == [{"accumulate": BF16, "chunk": SIZE}]


def test_a_loss_in_a_coarser_dtype_is_returned_as_before() -> None:
    (plain,) = (one for one in in_one_stage(kernel_of(product, {}), BF16) if "loss" in one.changes)
    assert plain.changes == {"loss": BF16, "returned": "float32"}
    returned = {"returned": {"loss": "float16"}}
    (mapped,) = (one for one in in_one_stage(kernel_of(product, returned), BF16) if "loss" in one.changes)
    assert (mapped.changes["returned"]["loss"], set(mapped.changes["returned"].values())) == (
        "float16",
        {"float16", "float32"},
    )
    (as_a_whole,) = (one for one in in_one_stage(kernel_of(product, {"returned": BF16}), BF16) if "loss" in one.changes)
    assert as_a_whole.changes == {"loss": BF16}


def test_what_is_declared_already_is_not_said_again() -> None:
    kernel = kernel_of(product, PRODUCT)
    changes = [one.changes for one in (*in_one_stage(kernel, BF16), *in_several_stages(kernel, BF16))]
    assert not any("logits" in one or "dlogits" in one for one in changes)
    assert [sorted(one) for one in changes if len(one) > 1 and "chunk" not in one and "loss" not in one] == [
        ["accumulate_hidden", "vocab_chunk"]
    ] * 7 + [["logprobs", "logsumexp"]]


def test_heads_without_a_weight_have_no_running_sums() -> None:
    @candidate("nll", head="logits", dtypes=(BF16,))
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        return inputs.logits.sum()

    changes = [*in_one_stage(kernel, BF16), *in_several_stages(kernel, BF16)]
    assert not any("chunk" in one.changes or "vocab_chunk" in one.changes for one in changes)


@pytest.mark.slow
def test_a_property_that_fails_by_rounding_says_what_to_declare_before_its_own_remedy() -> None:
    # On another problem the sum of the weight's gradient explains as much, and is named.
    result = judged(product, {"logits": BF16}, "hopeless-labels", seed=2)
    assert result.verdict is Verdict.DISAGREE
    assert result.reasons[1].startswith(
        "to do: if the kernel rounds the gradient of the logits to bfloat16, declare for bfloat16 "
        "Precision(logits='bfloat16', dlogits='bfloat16'); with this declaration, the property holds. If not, "
        "compute logit - logsumexp"
    )
    assert judged(product, PRODUCT, "hopeless-labels").verdict is Verdict.AGREE


@pytest.mark.slow
def test_a_property_that_fails_by_more_than_rounding_has_its_own_remedy_alone() -> None:
    def adds_a_little(inputs: Any) -> Tensor:
        logits = (inputs.hidden @ inputs.weight.T).float()
        return -torch.log(logits.softmax(-1).gather(-1, inputs.labels[:, None]) + 1e-20).squeeze(-1)

    result = judged(adds_a_little, PRODUCT, "hopeless-labels")
    assert result.verdict is Verdict.DISAGREE
    assert result.reasons[1].startswith("to do: compute logit - logsumexp")


@pytest.mark.slow
@pytest.mark.parametrize("losses", [product, product_in_a_loop])
def test_a_mistake_beside_undeclared_rounding_is_named_with_both(losses: Any) -> None:
    @candidate("nll", head="hidden", dtypes=(BF16,))
    def off_by_one(inputs: Any, options: Any, mesh: Any) -> Tensor:
        return torch.where(inputs.mask, losses(inputs), 0.0).sum() / (inputs.valid_tokens + 1)

    cause, *_ = sentences(run_cell(Cell(off_by_one, Layout(), BF16), Settings(shrink_calls=20)))
    assert cause == (
        "cause: in place of valid_tokens the kernel takes valid_tokens + 1. In addition, it rounds more to bfloat16 "
        "than its declared precision says"
    )


@pytest.mark.slow
def test_some_problems_that_rounding_explains_are_counted() -> None:
    @candidate("nll", head="hidden", dtypes=(BF16,), supports={"temperature": ANY})
    def late(inputs: Any, options: Any, mesh: Any) -> Tensor:
        losses = product(inputs) / options.temperature  # belongs to the logits
        return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    found = sentences(run_cell(Cell(late, Layout(), BF16), Settings(shrink_calls=20)))
    assert any(
        "failing problems would agree if the kernel declared to round the logits, the gradient of the logits and" in one
        for one in found
    )


def test_the_sum_over_tp_is_rounded_only_by_kernels_with_tp() -> None:
    changes = [one.changes for one in in_one_stage(kernel_of(product, {}, axes=("dp", "tp")), BF16)]
    assert {"reduce": BF16} in changes
    assert {"reduce": BF16} not in [one.changes for one in in_one_stage(kernel_of(product, {}), BF16)]
