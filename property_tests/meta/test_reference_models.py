# SPDX-License-Identifier: Apache-2.0
"""Reference log-probabilities: below 0, and those of a reference model that is given."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossgate import ANY, Candidate, Excluded, Layout, Precision, Problem, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.strategies import DrawnProblem

ITSELF = Excluded("near", "far", "equal", because="it computes the reference's log-probabilities itself")
PRECISION = {"float32": Precision(), "bfloat16": Precision(logits="bfloat16", dlogits="bfloat16")}


def token_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


def declared(hidden: str = "reference_hidden", weight: str = "reference_weight", **changed: Any) -> Candidate:
    """Returns a DPO kernel that computes reference log-probabilities from two of its inputs."""

    @candidate(
        "dpo",
        head="hidden",
        axes=("dp",),
        dtypes=tuple(PRECISION),
        precision=PRECISION,
        supports={"reference": ITSELF, "loss_type": ANY, **changed},
    )
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        states, rows = (getattr(inputs, name).detach().to(inputs.hidden.dtype) for name in (hidden, weight))
        reference = token_logprobs(states, rows, inputs.labels)
        apart = token_logprobs(inputs.hidden, inputs.weight, inputs.labels) - reference
        apart = torch.where(inputs.mask, apart, 0.0)
        rewards = apart.new_zeros(inputs.sequences).index_add(0, inputs.sequence, apart)
        margins, beta = rewards[0::2] - rewards[1::2], options.reference_policy_kl_penalty
        losses = -F.logsigmoid(beta * margins) if options.loss_type == "sigmoid" else (margins - 0.5 / beta) ** 2
        return torch.where(inputs.sample_mask[0::2], losses, 0).sum() / (inputs.valid_sequences / 2).clamp(min=1)

    return kernel


def drawn(kernel: Candidate, dtype: str = "float32", count: int = 60) -> list[Problem]:
    return Draws(kernel, dtype, "references", count).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_model_gives_the_log_probabilities(dtype: str) -> None:
    kernel = declared()
    for problem in drawn(kernel):
        dense = DrawnProblem(replace(problem, dtype=dtype), SPECS["dpo"])
        inputs = dense.inputs(dtype=torch.float64)
        assert inputs.reference_hidden.shape[1] == inputs.reference_weight.shape[1] == inputs.hidden.shape[1]
        own = (inputs.reference_hidden @ inputs.reference_weight.T).log_softmax(-1)
        own = own.gather(1, inputs.labels[:, None]).squeeze(1)
        if dense.options.reference_layout == "next":
            torch.testing.assert_close(own, inputs.reference_logprobs)
        low = inputs.reference_hidden.to(getattr(torch, dtype)).double()
        assert torch.equal(low, inputs.reference_hidden)


def test_others_get_a_model_of_no_width() -> None:
    plain = candidate("dpo", head="hidden", name="plain")(lambda inputs, options, mesh: inputs.hidden.sum())
    for problem in drawn(plain, count=10):
        inputs = DrawnProblem(problem, SPECS["dpo"]).inputs()
        assert inputs.reference_hidden.shape == (len(inputs.labels), 0)
        assert inputs.reference_weight.shape == (problem.vocab, 0)


def test_the_policy_is_near_the_model_and_far_from_it() -> None:
    """In widths of which each label may have a column of its own."""
    batches = [BoundProblem(SPECS["dpo"], problem).batch for problem in drawn(declared(reference_layout="next"))]
    wide = [batch for batch in batches if batch.leaves["hidden"].shape[1] > batch.partition.vocab > 2]
    apart = torch.cat([(batch.policy - batch.fields["reference_logprobs"]).abs() for batch in wide])
    assert len(apart) > 100
    assert (apart < 0.5).float().mean() > 0.1
    assert (apart > 2).float().mean() > 0.1


def test_tp_ranks_hold_their_rows_of_the_weight() -> None:
    problem = next(one for one in drawn(declared()) if one.vocab > 8)
    split = replace(problem, layout=Layout(tp=2))
    parts = [DrawnProblem(split, SPECS["dpo"]).inputs(rank).reference_weight for rank in range(2)]
    assert torch.equal(torch.cat(parts), DrawnProblem(problem, SPECS["dpo"]).inputs().reference_weight)


BELOW = {"dpo": ("near", "far", "equal", "model"), "grpo": ("near", "equal"), "clipped_pg": ("near", "equal")}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("spec", BELOW)
def test_reference_log_probabilities_are_not_above_0(spec: str) -> None:
    plain = candidate(spec, head="hidden", name="plain")(lambda inputs, options, mesh: inputs.hidden.sum())
    seen = set[str]()
    for problem in [*drawn(plain, count=150), *(drawn(declared()) if spec == "dpo" else [])]:
        scenario = problem.scenario.get("reference", "near")
        if scenario in BELOW[spec]:
            seen.add(scenario)
            assert bool((BoundProblem(SPECS[spec], problem).batch.fields["reference_logprobs"] <= 0).all())
    assert seen == set(BELOW[spec])


# Verdicts


def verdict(kernel: Candidate, layout: str, dtype: str = "float32") -> Verdict:
    also = tuple(one for one in PROPERTIES.values() if not one.needs_adequacy and one.applies(kernel))
    found = run_cell(Cell(kernel, Layout.parse(layout), dtype, also=also), Settings(rounds=8, shrink_calls=0))
    assert not any("raised" in reason for reason in found.reasons), found.reasons
    return found.verdict


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("layout", ["single", "dp=2"])
def test_a_kernel_that_computes_them_agrees(layout: str, dtype: str) -> None:
    assert verdict(declared(), layout, dtype) is Verdict.AGREE


WRONG = {
    "the policy's weight": {"weight": "weight"},
    "the policy's hidden states": {"hidden": "hidden"},
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_that_takes_the_wrong_ones_disagrees(wrong: str, dtype: str) -> None:
    assert verdict(declared(**WRONG[wrong]), "single", dtype) is Verdict.DISAGREE


def test_a_kernel_that_does_not_say_so_disagrees() -> None:
    narrow = declared(reference=Excluded("equal", because="so"))
    cell = Cell(narrow, Layout(), "float32")
    assert run_cell(cell, Settings(shrink_calls=0)).verdict is Verdict.DISAGREE
