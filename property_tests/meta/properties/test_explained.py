# SPDX-License-Identifier: Apache-2.0
"""Properties that one fault breaks are told once; what to do follows from how the kernel fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bank.property_bugs import PROPERTY_BUGS
from lossgate import Candidate, Layout, UsageError, candidate
from lossgate.adequacy.deck import deck_of
from lossgate.cases.case import Case
from lossgate.cases.placement import splits_of
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.cell_record import Explained
from lossgate.engine.explained import Broken, in_order
from lossgate.engine.explained import explained as why_broken
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES
from lossgate.properties import PROPERTIES
from lossgate.worlds.base import World

MakeWorld = Callable[[str], World]


def in_cell(kernel: Candidate, *names: str, layout: str = "single") -> CellResult:
    """Verifies a kernel in one cell, with these properties beside agreement."""
    cell = Cell(kernel, Layout.parse(layout), "float32", also=tuple(PROPERTIES[name] for name in names))
    return run_cell(cell, replace(PROFILES["dev"], shrink_calls=0))


def explained(result: CellResult) -> dict[str, Explained | None]:
    """Returns the broken properties in the order in which they are told, and what explains them."""
    return {one.name: one.explained for one in result.record.properties if not one.holds}


class _InPlace(torch.autograd.Function):
    """Keeps the gradient in the memory of the logits, as Liger does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        own, rows = logits.detach(), torch.arange(len(labels))
        logprobs = own.log_softmax(-1)
        loss = -torch.where(mask, logprobs[rows, labels], 0.0).sum() / count
        gradient = logprobs.exp()
        gradient[rows, labels] -= 1
        own.copy_(gradient * mask[:, None] / count)
        ctx.save_for_backward(own)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None, None


@candidate("nll", head="logits")
def in_place(inputs: Any, options: Any, mesh: Any) -> Tensor:
    count = inputs.valid_tokens.clamp(min=1)
    return _InPlace.apply(inputs.logits, inputs.labels, inputs.mask, count)  # type: ignore[return-value]


@candidate("nll", head="logits")
def in_place_and_strides(inputs: Any, options: Any, mesh: Any) -> Tensor:
    mask = inputs.mask.as_strided(inputs.mask.shape, (1,))
    count = inputs.valid_tokens.clamp(min=1)
    return _InPlace.apply(inputs.logits, inputs.labels, mask, count)  # type: ignore[return-value]


def test_what_writing_to_inputs_breaks_is_told_once() -> None:
    result = in_cell(in_place, "gradients-add-up", "checkpointing", "inputs-kept", "strided-inputs")
    because = Explained(by="inputs-kept", how="mended")
    assert explained(result) == {"inputs-kept": None, "gradients-add-up": because, "checkpointing": because}
    assert result.reasons[0] == "property inputs-kept: the kernel wrote to logits"
    assert result.reasons[1].startswith("to do: write to no tensor that was given")
    assert result.reasons[2:] == ("broken for this reason alone: property gradients-add-up and property checkpointing",)
    assert result.failure is not None
    assert result.failure.held_to == "inputs-kept"


def test_what_cannot_be_tried_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes can't be given a mended kernel."""

    def cannot_be_sent(*_: object) -> None:
        raise UsageError("differs in its kernel")

    monkeypatch.setattr("lossgate.engine.explained.run_case", cannot_be_sent)
    result = in_cell(in_place_and_strides, "gradients-add-up", "inputs-kept", "strided-inputs")
    assert explained(result) == {
        "inputs-kept": None,
        "strided-inputs": None,
        "gradients-add-up": Explained(by="inputs-kept", how="perhaps"),
    }
    assert "perhaps broken for the same reason: property gradients-add-up" in result.reasons


def test_an_independent_defect_is_told_beside_it() -> None:
    result = in_cell(in_place_and_strides, "gradients-add-up", "inputs-kept", "strided-inputs")
    assert explained(result) == {
        "inputs-kept": None,
        "gradients-add-up": Explained(by="inputs-kept", how="mended"),
        "strided-inputs": None,
    }
    assert "to do: take strides into account, or call .contiguous() first" in result.reasons


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        ("no-grad", {"no-grad": None, "checkpointing": Explained(by="no-grad", how="mended")}),
        ("masked-values", {"masked-values": None, "masked-nan": Explained(by="masked-values", how="mended")}),
        (
            "upstream-scaled",
            {"upstream-scaled": None, "gradients-add-up": Explained(by="upstream-scaled", how="perhaps")},
        ),
        ("strided-inputs", {"strided-inputs": None}),
    ],
)
def test_the_cause_of_a_known_bug_is_told_first(bug: str, broken: dict[str, Explained | None]) -> None:
    names = [name for name in PROPERTIES if name in {*broken, "no-grad", "inputs-kept"}]
    assert explained(in_cell(PROPERTY_BUGS[bug].candidate, *names)) == broken


def test_a_division_by_0_is_told_once(make_world: MakeWorld) -> None:
    kernel, world = PROPERTY_BUGS["nothing-trained"].candidate, make_world("single")
    deck, broken = deck_of(kernel, "float32", 0), list[Broken]()
    placed = next(one for one in deck.on(world.layout, splits_of(kernel), deck.entries) if one.problem.tokens > 8)
    for name in ("few-tokens", "nothing-trained"):
        case = run_case(Case(kernel, placed.problem, world), PROPERTIES[name])
        assert case.manner == "not finite"
        broken.append(Broken(PROPERTIES[name], placed, case))
    told = in_order(broken)
    assert [one.held_to.name for one in told] == ["nothing-trained", "few-tokens"]
    found = why_broken(told, Cell(kernel, world.layout, "float32"), world)
    assert found == {"few-tokens": Explained(by="nothing-trained", how="mended")}


def losses(inputs: Any) -> Tensor:
    return F.cross_entropy(inputs.logits, inputs.labels.masked_fill(~inputs.mask, -100), reduction="none")


@candidate("nll", head="logits", axes=("dp",))
def first_token(inputs: Any, options: Any, mesh: Any) -> Tensor:
    of_each = losses(inputs)
    return (of_each + 0.0 * of_each[0].detach()).sum() / inputs.valid_tokens.clamp(min=1)


@candidate("nll", head="logits")
def deviation(inputs: Any, options: Any, mesh: Any) -> Tensor:
    of_each = losses(inputs)
    total, others = of_each.sum() / inputs.valid_tokens.clamp(min=1), int(inputs.mask.sum()) - 1
    return total + 0.0 * total / others if others >= 0 else total


@candidate("nll", head="hidden")
def detached(inputs: Any, options: Any, mesh: Any) -> Tensor:
    logits = inputs.hidden @ inputs.weight.detach().T
    total = F.cross_entropy(logits, inputs.labels.masked_fill(~inputs.mask, -100), reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)


@pytest.mark.parametrize(
    ("kernel", "held_to", "todo"),
    [
        (first_token, "microbatches", "let a microbatch have no token: minima, indices and loops over nothing"),
        (deviation, "few-tokens", "look for 0 / 0: the variance of one number is"),
        (detached, "agreement", "let backward reach each input: detach none, and where there is nothing to compute"),
    ],
)
def test_what_to_do_follows_from_how_the_kernel_fails(kernel: Candidate, held_to: str, todo: str) -> None:
    cell = Cell(kernel, Layout(), "float32", PROPERTIES[held_to])
    failure = run_cell(cell, replace(PROFILES["dev"], shrink_calls=0)).failure
    assert failure is not None
    assert failure.todo.startswith(todo)
