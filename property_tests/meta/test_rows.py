# SPDX-License-Identifier: Apache-2.0
"""``to_rows``, ``from_rows`` and ``per_sequence`` of what a kernel is given."""

from math import nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lossgate import Candidate, Layout, Outputs, Problem, UsageError, candidate
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.problems.batch import offsets
from lossgate.problems.partition import Partition
from lossgate.problems.whole_sequences import TOKENS, Tokens, WholeSequences
from lossgate.specs.packed_batch import Batch
from lossgate.strategies import DrawnProblem

SIZES: dict[str, Any] = {"masks": ("all",) * 4, "hidden": 1, "vocab": 5}


def batch_of(partition: Partition, rank: int = 0, input_ids: Tensor | None = None, mask: Tensor | None = None) -> Batch:
    own = partition.sequences(partition.layout.coordinate(rank)["dp"])
    fields = {
        "cu_seqlens": offsets(partition.lengths[s] for s in own),
        "cu_seqlens_padded": offsets(partition.padded_lengths[s] for s in own),
    }
    tokens = int(fields["cu_seqlens_padded"][-1])
    given_ids = torch.zeros(tokens) if input_ids is None else input_ids
    given_mask = torch.ones(tokens, dtype=torch.bool) if mask is None else mask
    return Batch.of(fields | {"input_ids": given_ids, "mask": given_mask})


PARTITION = Partition(Layout(), (3, 0, 2), vocab=7, pad_to_multiple=2)
"""Padded to 4, 0 and 2 tokens."""


def test_rows_are_padded_on_the_right() -> None:
    batch = batch_of(PARTITION)
    assert batch.to_rows(torch.arange(6)).tolist() == [[0, 1, 2], [0, 0, 0], [4, 5, 0]]
    assert batch.to_rows(torch.arange(6), fill=-100).tolist() == [[0, 1, 2], [-100] * 3, [4, 5, -100]]
    assert batch.to_rows(torch.ones(6, dtype=torch.bool)).tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    assert batch.to_rows(torch.zeros(6, 5, 4)).shape == (3, 3, 5, 4)


def test_tokens_come_back_from_rows() -> None:
    batch = batch_of(PARTITION)
    wide, narrow = torch.arange(12.0).reshape(3, 4), torch.arange(6.0).reshape(3, 2)
    assert batch.from_rows(wide).tolist() == [0, 1, 2, 0, 8, 9]
    assert batch.from_rows(narrow).tolist() == [0, 1, 0, 0, 4, 5]  # the last token predicts nothing


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_rows_undo_each_other_and_gradients_flow(lengths: list[int], dp: int, multiple: int, rank: int) -> None:
    partition = Partition(Layout(dp=dp), tuple(lengths), vocab=3, pad_to_multiple=multiple)
    batch = batch_of(partition, min(rank, dp - 1))
    tokens = int(batch.cu_seqlens_padded[-1])
    hidden = torch.arange(2.0 * tokens).reshape(tokens, 2).requires_grad_()
    rows = batch.to_rows(hidden)
    assert rows.shape == (batch.sequences, max([1, *batch.lengths.tolist()]), 2)
    real = torch.zeros(tokens, 1)
    for start, length in zip(batch.cu_seqlens_padded.tolist(), batch.lengths.tolist(), strict=False):
        real[start : start + length] = 1
    back = batch.from_rows(rows)
    assert torch.equal(back, hidden * real)
    upstream = torch.arange(2.0 * tokens).reshape(tokens, 2) + 1
    back.backward(upstream)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, upstream * real)


def test_rows_are_as_wide_as_those_that_are_given() -> None:
    given_rows = torch.zeros(3, 5)
    assert batch_of(PARTITION, input_ids=given_rows).to_rows(torch.arange(6)).shape == (3, 5)


def test_rows_without_tokens_have_a_column() -> None:
    nothing = Partition(Layout(dp=2), (3,), vocab=7)
    assert batch_of(nothing, rank=1).to_rows(torch.zeros(0, 4)).shape == (0, 1, 4)
    assert batch_of(nothing, rank=1).from_rows(torch.zeros(0, 1)).shape == (0,)
    assert batch_of(Partition(Layout(), (0, 0), vocab=7)).to_rows(torch.zeros(0), fill=2).tolist() == [[2], [2]]


@pytest.mark.parametrize("tokens", TOKENS)
def test_one_number_for_each_sequence(tokens: Tokens) -> None:
    """That of its trained tokens: others mean nothing."""
    problem = Problem(spec="nll", head="logits", dtype="float32", lengths=(4, 0, 2, 1), **SIZES)
    partition = Partition(Layout(), problem.lengths, vocab=7, pad_to_multiple=3)
    numbers = torch.tensor([7, nan, 7, nan, nan, nan, 5, nan, nan, nan, nan, nan])
    mask = torch.tensor([True, False, True, False, False, False, True, *[False] * 5])
    if tokens != "shard":
        whole = WholeSequences.of(partition, tokens, 0)
        numbers, mask = (whole.lay(one, shifted=True) for one in (numbers, mask))
    batch = batch_of(partition, input_ids=torch.zeros_like(numbers), mask=mask)
    assert batch.per_sequence(numbers).tolist() == [7, 0, 5, 0]


WRONG = {
    "of another rank": (lambda b: b.to_rows(torch.zeros(5, 2)), r"to_rows\(a tensor of shape \[5, 2\]\): .*\[6, .*cp"),
    "a scalar": (lambda b: b.to_rows(torch.tensor(1.0)), r"to_rows\(a tensor of shape \[\]\): expected \[6, ...\]"),
    "no rows": (lambda b: b.from_rows(torch.zeros(6)), r"from_rows\(a tensor of shape \[6\]\): expected \[3, S, ...\]"),
    "too few rows": (lambda b: b.from_rows(torch.zeros(2, 3)), r"expected \[3, S, ...\], a row for each sequence"),
    "too narrow": (lambda b: b.from_rows(torch.zeros(3, 1)), "S is at least 2: the tokens of the longest sequence"),
    "different": (
        lambda b: b.per_sequence(torch.arange(6.0)),
        r"per_sequence\(a tensor of shape \[6\]\): the trained tokens .* have different numbers\. .*Excluded",
    ),
    "no number each": (
        lambda b: b.per_sequence(torch.zeros(3)),
        r"per_sequence\(a tensor of shape \[3\]\): expected a number for each token, in the shape of mask, \[6\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_rows(wrong: str) -> None:
    call, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        call(batch_of(PARTITION))


# Kernels


def framework(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probabilities [B, S] of labels, as frameworks do."""
    return -F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def kernel_of_rows(inputs: Any, options: Any, mesh: Any) -> Outputs:
    targets = inputs.to_rows(inputs.labels.masked_fill(~inputs.mask, -100), fill=-100)
    logprobs = framework(inputs.to_rows(inputs.logits), targets)
    return Outputs(loss=-logprobs.sum() / inputs.valid_tokens.clamp(min=1), logprobs=inputs.from_rows(logprobs))


def kernel_of_ids(inputs: Any, options: Any, mesh: Any) -> Outputs:
    """It is given rows of ids, and shifts them as frameworks do."""
    targets = inputs.input_ids.masked_fill(~inputs.mask, -100)[:, 1:]
    logprobs = framework(inputs.to_rows(inputs.logits)[:, :-1], targets)
    return Outputs(loss=-logprobs.sum() / inputs.valid_tokens.clamp(min=1), logprobs=inputs.from_rows(logprobs))


def declared(kernel: Any, tokens: Tokens = "shard", axes: Any = ("dp",)) -> Candidate:
    return candidate("nll", head="logits", tokens=tokens, axes=axes, differentiable=("loss", "logprobs"))(kernel)


@pytest.mark.parametrize("layout", ["single", "dp=3"])
@pytest.mark.parametrize(("kernel", "tokens"), [(kernel_of_rows, "shard"), (kernel_of_ids, "rows")])
def test_kernels_of_rows_agree(kernel: Any, tokens: Tokens, layout: str) -> None:
    found = run_cell(Cell(declared(kernel, tokens), Layout.parse(layout), "float32"), Settings(examples=12, rounds=8))
    assert found.verdict is Verdict.AGREE, found.reasons


def test_rows_that_are_wrong_disagree() -> None:
    def late(inputs: Any, options: Any, mesh: Any) -> Outputs:
        right = kernel_of_rows(inputs, options, mesh)
        rows = inputs.to_rows(right.logprobs)
        return Outputs(loss=right.loss, logprobs=inputs.from_rows(rows.roll(1, 1)))

    found = run_cell(Cell(declared(late), Layout(), "float32"), Settings(examples=12, shrink_calls=0))
    assert found.verdict is Verdict.DISAGREE


def test_rows_under_cp_are_refused_in_a_line() -> None:
    cell = Cell(declared(kernel_of_rows, axes=("cp",)), Layout(cp=2), "float32")
    found = run_cell(cell, Settings(examples=4, shrink_calls=0))
    assert "a rank of a layout with cp holds a part of each sequence, so leave cp out of axes" in found.reasons[0]


def test_references_have_rows_too() -> None:
    problem = Problem(spec="nll", head="logits", dtype="float32", lengths=(3, 2, 0, 0), **SIZES)
    inputs = DrawnProblem.from_json(problem.to_json()).inputs(dtype=torch.float64)
    assert inputs.to_rows(inputs.logits).shape == (4, 3, 5)
