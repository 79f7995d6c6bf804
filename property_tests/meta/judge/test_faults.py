# SPDX-License-Identifier: Apache-2.0
"""What is wrong whatever the noise: infinities, NaN, zeros, gradients that leak or are missing."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_bank.cross_entropy import STYLES, make
from lossgate import Outputs, candidate
from lossgate.inputs import NllHidden
from lossgate.judge.explain import explain

from .checks import MakeWorld, bind, judge_changed, make_problem, run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("output", ["loss", "logprobs", "grad of hidden", "grad of weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_never_agrees(make_world: MakeWorld, dtype: str, output: str, value: float) -> None:
    def spoil(outputs: dict[str, Tensor]) -> None:
        wrong = outputs[output].clone()
        wrong.view(-1)[0] = value
        outputs[output] = wrong

    comparison = judge_changed(make_problem(dtype), make_world("single"), spoil)[output]
    assert "; the reference is finite" in next(explain([comparison]))


def test_log_probabilities_of_masked_tokens_may_be_nan(make_world: MakeWorld) -> None:
    problem = make_problem("float32")
    mask = bind(problem).batch.fields["mask"]

    def spoil(outputs: dict[str, Tensor]) -> None:
        outputs["logprobs"] = outputs["logprobs"].masked_fill(~mask, float("nan"))

    assert judge_changed(problem, make_world("single"), spoil)["logprobs"].agrees


def test_a_gradient_where_there_should_be_none_is_a_fault(make_world: MakeWorld) -> None:
    problem = make_problem("float32")
    masked = int((~bind(problem).batch.fields["mask"]).nonzero()[0])

    def leak(outputs: dict[str, Tensor]) -> None:
        outputs["grad of hidden"] = outputs["grad of hidden"].index_fill(0, torch.tensor([masked]), 1e-30)

    comparison = judge_changed(problem, make_world("single"), leak)["grad of hidden"]
    assert "entries should be exactly zero, but are up to 1e-30" in next(explain([comparison]))


def test_a_missing_gradient_is_a_fault(make_world: MakeWorld) -> None:
    @candidate("nll", head="hidden")
    def frozen(inputs: NllHidden, options: object, mesh: object) -> Outputs:
        outputs = make(STYLES["float32"][1])(replace(inputs, weight=inputs.weight.detach()), options, mesh)  # type: ignore[arg-type]
        assert isinstance(outputs, Outputs)
        return Outputs(loss=outputs.loss)

    result = run(frozen, make_problem("float32", options={}, cotangent="loss"), make_world("single"))
    assert result.findings == ("grad of weight: backward did not reach it on rank 0; it is None there",)
    assert result.manner == "missing"


def test_a_zero_result_is_rejected_wherever_there_is_a_reference(make_world: MakeWorld) -> None:
    def vanish(outputs: dict[str, Tensor]) -> None:
        outputs.update({name: torch.zeros_like(tensor) for name, tensor in outputs.items()})

    comparisons = judge_changed(make_problem("bfloat16"), make_world("single"), vanish)
    assert not any(comparison.agrees for comparison in comparisons.values())
