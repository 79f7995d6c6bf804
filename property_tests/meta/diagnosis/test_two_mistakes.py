# SPDX-License-Identifier: Apache-2.0
"""Two mistakes at once are named together, each with what it is."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lossgate import ANY, Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import PlacedProblem
from lossgate.counterfactuals import seams
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import mistake
from lossgate.counterfactuals.setting import Setting
from lossgate.declaration.candidate import Candidate, candidate
from lossgate.diagnosis.cause import Diagnosis
from lossgate.diagnosis.two_mistakes import both, each_in_its_own
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.problems.problem import Problem
from lossgate.specs.logit_filter import LOGIT_FILTER
from lossgate.specs.outputs import LOSS

BANK = counterfactuals_of(SPECS["nll"], "hidden")


def with_gradient_times(x: Tensor, factor: float) -> Tensor:
    return x * factor + (x * (1 - factor)).detach()


def kernel_with(*mistakes: str) -> Candidate:
    @candidate("nll", head="hidden", dtypes=("float32",), supports={"temperature": ANY}, name="-".join(mistakes))
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        hidden = with_gradient_times(inputs.hidden, 2.0) if "hidden times 2" in mistakes else inputs.hidden
        weight = with_gradient_times(inputs.weight, 0.5) if "weight times 0.5" in mistakes else inputs.weight
        logits = hidden @ weight.T / (1.0 if "temperature" in mistakes else options.temperature)
        losses = torch.nn.functional.cross_entropy(logits, inputs.labels, reduction="none")
        mask = torch.ones_like(inputs.mask) if "mask" in mistakes else inputs.mask
        count = inputs.valid_tokens + (1 if "count" in mistakes else 0)
        return torch.where(mask, losses, 0.0).sum() / count.clamp(min=1)

    return kernel


def diagnosed(*mistakes: str) -> Diagnosis:
    result = run_cell(Cell(kernel_with(*mistakes), Layout(), "float32"), Settings(shrink_calls=20))
    assert result.verdict is Verdict.DISAGREE
    assert result.run.diagnosis is not None
    return result.run.diagnosis


MASK = "the mask is ignored, and padding counts too"
TEMPERATURE = "the kernel computes as if temperature were 1.0, its default"
COUNT = "in place of valid_tokens the kernel takes valid_tokens + 1"
HIDDEN = "the gradient of hidden: multiplied by 2"
WEIGHT = "the gradient of weight: divided by 2"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("mistakes", "names", "one", "other"),
    [
        # Each shows in outputs of its own.
        (("hidden times 2", "weight times 0.5"), "outputs times 2; outputs times 1 / (2)", HIDDEN, WEIGHT),
        # One shows in all outputs, and the other in one of them.
        (("mask", "weight times 0.5"), "mask ignored, padding too; outputs times 1 / (2)", MASK, WEIGHT),
        # Both show in all outputs: one alone shows where the other has nothing to do.
        (("mask", "temperature"), "mask ignored, padding too; temperature as 1.0", MASK, TEMPERATURE),
        (("temperature", "count"), "valid_tokens is one too many; temperature as 1.0", COUNT, TEMPERATURE),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else "",
)
def test_two_mistakes_are_named(mistakes: tuple[str, ...], names: str, one: str, other: str) -> None:
    found = diagnosed(*mistakes)
    assert [cause.name for cause in found.causes] == [names]
    assert found.causes[0].words == f"there are two mistakes. One: {one}. The other: {other}"


@pytest.mark.slow
def test_what_to_do_is_said_of_both() -> None:
    (cause,) = diagnosed("mask", "count").causes
    assert set(cause.todo.split("; and ")) == {
        "select with inputs.mask before you add up",
        "divide by valid_tokens as it is given",
    }


def test_one_mistake_is_not_taken_for_two() -> None:
    found = diagnosed("temperature")
    assert found.causes[0].words == TEMPERATURE


def test_three_mistakes_get_no_name() -> None:
    assert diagnosed("mask", "temperature", "weight times 0.5", "count").causes == ()


def test_mistakes_of_one_stage_are_not_put_together() -> None:
    assert both(BANK["temperature ignored"], BANK["temperature applied twice"]) is None
    assert both(BANK["temperature ignored"], BANK["temperature ignored"]) is None
    made = both(BANK["temperature ignored"], BANK["outputs times 2"])
    assert made is not None
    assert both(made, each_in_its_own(BANK["outputs times 2"], (), BANK["outputs times cp"], ())) is None


def test_a_filter_and_other_labels_that_cannot_be_computed_together_say_nothing() -> None:
    """A kernel that lost the last token of the nucleus ended a run, where this pair was tried."""
    problem = Problem(
        spec="nll", head="logits", dtype="float32", lengths=(6,), masks=("all",), hidden=8, vocab=33, seed=0
    )
    setting = Setting(PlacedProblem(BoundProblem(SPECS["nll"], problem), problem), [LOSS])
    labels = mistake("labels", "labels", fields=lambda own: {"labels": own.fields["labels"].flip(0)})
    filtered = mistake("filter", "filter", fields=lambda own: {LOGIT_FILTER: None})
    pair = both(labels, filtered)
    assert pair is not None
    assert labels.run(setting) is not None
    assert pair.run(setting) is None
    with pytest.raises(ValueError, match="one mistake changes labels and another a stage of tokens"):
        seams.run(setting, pair.seams)
