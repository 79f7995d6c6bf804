# SPDX-License-Identifier: Apache-2.0
"""Equal numbers are rounded alike, by kernels as by the runs that the judge makes of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lossgate import Outputs, Precision, Problem, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.kernel_noise import PHASES, OnGrid
from lossgate.inputs import NllLogits
from lossgate.losses import SPECS
from lossgate.numerics.float_formats import FLOAT32, FLOAT_FORMATS

from .checks import MakeWorld, by_output, run

BFLOAT16 = FLOAT_FORMATS["bfloat16"]
COARSE = Precision(logprobs="bfloat16")
EQUAL = Problem(
    spec="nll", head="logits", dtype="float32", lengths=(64,), masks=("all",), hidden=1, vocab=33, logit_std=1e-9
)
"""All log-probabilities are -log 33 = -3.4965, and -3.5 in bfloat16."""


def kernel(times: float = 1.0) -> Any:
    @candidate("nll", head="logits", dtypes=("float32",), precision=COARSE)
    def rounded(inputs: NllLogits, options: Any, mesh: Any) -> Outputs:
        whole = inputs.logits.log_softmax(-1)
        logprobs = whole + (whole.bfloat16() - whole).detach()
        own = logprobs.gather(1, inputs.labels[:, None]).squeeze(1)
        loss = -torch.where(inputs.mask, own, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
        return Outputs(loss=loss * times, logprobs=own)

    return rounded


def test_a_mean_of_equal_tokens_is_off_by_the_rounding_of_each(make_world: MakeWorld) -> None:
    found = run(kernel(), EQUAL, make_world("single"))
    loss = by_output(found.comparisons)["loss"]
    assert loss.values["scale"] == pytest.approx(0.001, rel=0.01)
    assert found.agrees, found.findings


def test_an_error_of_one_percent_is_seen_beside_it(make_world: MakeWorld) -> None:
    found = run(kernel(1.01), EQUAL, make_world("single"))
    loss = by_output(found.comparisons)["loss"]
    assert not loss.agrees
    assert 0.01 < loss.values["scale"] < 0.012


def test_different_tokens_get_no_more_than_their_noise(make_world: MakeWorld) -> None:
    """What equal tokens are allowed would excuse this loss, too."""
    different = replace(EQUAL, logit_std=1.0)
    limits = [
        by_output(run(kernel(), problem, make_world("single")).comparisons)["loss"].limits["scale"]
        for problem in (EQUAL, different)
    ]
    assert limits[1] < 1.01 * limits[0] + 0.002
    assert run(kernel(), different, make_world("single")).agrees


def test_a_grid_moves_equal_numbers_alike() -> None:
    x = torch.tensor([1.0, 1.1, 1.1, -1.1, 3.0, 0.0, float("-inf")], dtype=torch.float64)
    first, other = (OnGrid(phase).round(x, BFLOAT16) for phase in PHASES)
    assert torch.equal(first, x.bfloat16().double())
    assert other[1] == other[2]
    assert 0 < (other - first)[1].abs() <= 1.1 * BFLOAT16.unit * 1.01
    assert other[-1] == x[-1]
    assert OnGrid(0.5).round(x, FLOAT32) is x


def test_kernels_in_float32_need_no_such_runs() -> None:
    bound, placed = BoundProblem(SPECS["nll"], EQUAL), EQUAL.partition
    stages = Precision().stages("float32", caller_reduces_hidden=False)
    assert bound.noise.alike(placed, stages, (), bound.reference(())) == {}
    assert bound.noise.alike(placed, COARSE.stages("float32", caller_reduces_hidden=False), (), bound.reference(()))
