# SPDX-License-Identifier: Apache-2.0
"""Where an output is wrong, said of kernels that nothing known explains as a whole."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lossgate import Layout, Precision
from lossgate.declaration.candidate import Candidate
from lossgate.dense_candidates import dense_candidate
from lossgate.diagnosis.cause import Diagnosis
from lossgate.diagnosis.where import RowKinds
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS

SETTINGS = Settings(shrink_calls=5)


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def with_backward(
    spec: str, head: str, leaf: str, change: Callable[[Any, Tensor], Tensor], **declared: Any
) -> Candidate:
    """Returns a right kernel that changes the gradient of a leaf."""
    right = dense_candidate(SPECS[spec], head)

    def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
        changed = _Backward.apply(getattr(inputs, leaf), lambda gradient: change(inputs, gradient))
        return right.kernel(replace(inputs, **{leaf: changed}), options, mesh)

    return replace(right, kernel=kernel, name="changed", **declared)


def diagnosed(candidate: Candidate, layout: str = "single") -> Diagnosis:
    result = run_cell(Cell(candidate, Layout.parse(layout), "float32"), SETTINGS)
    assert result.verdict is Verdict.DISAGREE
    assert result.run.diagnosis is not None
    return result.run.diagnosis


def last_of_sequences(inputs: Any) -> Tensor:
    last = torch.zeros(len(inputs.mask), dtype=torch.bool)
    ends = inputs.cu_seqlens_padded[:-1] + inputs.cu_seqlens.diff()
    last[(ends[inputs.cu_seqlens.diff() > 0] - 1).long()] = True
    return last


@pytest.mark.slow
def test_tokens_that_have_something_in_common_are_named() -> None:
    def noisy_at_ends(inputs: Any, gradient: Tensor) -> Tensor:
        pattern = (
            torch.linspace(1.0, 2.0, gradient.shape[1])
            * torch.tensor([1.0, -1.0]).repeat(gradient.shape[1])[: gradient.shape[1]]
        )
        return torch.where(last_of_sequences(inputs)[:, None], pattern, gradient)

    found = diagnosed(with_backward("nll", "logits", "logits", noisy_at_ends))
    assert found.causes == ()
    (sentence,) = [one for one in found.where if "the gradient of logits" in one]
    assert "at tokens that are the last of their sequence" in sentence
    assert "and at no others" in sentence
    assert f"where: {sentence}" in found.sentences


@pytest.mark.slow
def test_an_error_everywhere_says_by_what_factor() -> None:
    def first_coordinate(inputs: Any, gradient: Tensor) -> Tensor:
        return gradient.roll(1, 1)

    found = diagnosed(with_backward("nll", "hidden", "hidden", first_coordinate))
    assert found.causes == ()
    assert any(one.startswith("the gradient of hidden is wrong at") for one in found.where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "which", "what"),
    [
        ("nll", "every second sequence from the second on", "multiplied by 2"),
        ("dpo", "rejected sequences", "preference_loss_weight is doubled"),
    ],
)
def test_a_mistake_at_some_tokens_alone_is_named_with_them(spec: str, which: str, what: str) -> None:
    def doubled_in_second_sequences(inputs: Any, gradient: Tensor) -> Tensor:
        return torch.where((inputs.sequence % 2 == 1)[:, None], 2 * gradient, gradient)

    found = diagnosed(with_backward(spec, "logits", "logits", doubled_in_second_sequences))
    assert found.partly
    assert found.causes[0].words.endswith(f"at tokens of {which} alone")
    assert what in found.causes[0].words


@pytest.mark.slow
def test_a_coarser_stage_is_named_with_what_to_declare() -> None:
    def rounded(inputs: Any, gradient: Tensor) -> Tensor:
        return gradient.bfloat16().float()

    kernel = with_backward("nll", "logits", "logits", rounded, precision={"float32": Precision()})
    found = diagnosed(kernel)
    assert [cause.name for cause in found.causes] == ["Precision(dlogits='bfloat16')"]
    assert found.sentences[-1] == (
        "to do: compute the gradient of the logits in float32. Or, if it is meant, declare for float32 "
        "Precision(dlogits='bfloat16')"
    )


@pytest.mark.slow
def test_a_factor_is_not_taken_for_rounding() -> None:
    def slightly_larger(inputs: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 0.004 * torch.rand((), generator=torch.Generator().manual_seed(len(gradient))))

    found = diagnosed(with_backward("nll", "logits", "logits", slightly_larger))
    assert not any(cause.name.startswith("Precision") for cause in found.causes)


def test_a_rare_disagreement_says_that_it_is_rare() -> None:
    rare = Diagnosis(problems=6, tried=60, where=("only problems with a bias disagree, 6 of 60",))
    few = "cause: not named, since only 6 of 60 further problems disagree"
    assert rare.sentences == (few, "where: only problems with a bias disagree, 6 of 60")


@pytest.mark.slow
def test_a_rare_factor_is_named_all_the_same() -> None:
    def wrong_in_one_size(inputs: Any, gradient: Tensor) -> Tensor:
        return gradient * 3 if len(gradient) % 13 == 5 else gradient

    found = diagnosed(with_backward("nll", "logits", "logits", wrong_in_one_size))
    words = "the gradient of logits: multiplied by 3, on some problems, and no known trait tells them from the others"
    assert found.sentences[0] == f"cause: {words}"


@pytest.mark.parametrize(
    ("these", "others", "common", "best"),
    [
        ([True, True, False, False], [False, False, True, True], "first", ("first", 0)),
        ([True, False, False, False], [False, True, True, True], None, ("first", 1)),
        ([True, False, True, False], [False, True, False, True], None, None),
    ],
)
def test_traits_tell_rows_apart(these: list[bool], others: list[bool], common: str | None, best: Any) -> None:
    traits = {"first": torch.tensor([True, True, False, False]), "all": torch.ones(4, dtype=torch.bool)}
    rows = RowKinds([torch.tensor(these)], [torch.tensor(others)], [traits])
    assert rows.common() == common
    assert rows.best() == best
