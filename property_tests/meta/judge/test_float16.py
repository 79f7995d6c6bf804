# SPDX-License-Identifier: Apache-2.0
"""Problems in float16 stay in its range, and its smallest numbers are judged by their spacing."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernel_bank.bugs import scale_gradient
from lossgate import Candidate, Precision, Problem
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import sample_problems
from lossgate.dense_candidates import dense_candidate
from lossgate.judge.tolerance import Tolerance
from lossgate.losses import SPECS
from lossgate.numerics.float_formats import FLOAT_FORMATS
from lossgate.specs.outputs import gradient_output

from .checks import MakeWorld, run

FLOAT16 = FLOAT_FORMATS["float16"]
LARGEST = torch.finfo(torch.float16).max


def in_float16(spec: str, head: str) -> Candidate:
    return replace(dense_candidate(SPECS[spec], head), precision={"float16": Precision()})


@pytest.mark.slow(but=8)
@pytest.mark.parametrize(
    ("spec", "head"), [(spec.name, head) for spec in SPECS.values() for head in spec.inputs], ids="-".join
)
def test_dense_kernels_agree(make_world: MakeWorld, spec: str, head: str) -> None:
    kernel, world = in_float16(spec, head), make_world("single")
    for problem in sample_problems(kernel, world.layout, "float16", 6, seed=5):
        result = run(kernel, problem, world)
        assert result.agrees, (result.findings, problem.to_json())


def extreme(dtype: str, **given: Any) -> BoundProblem:
    problem = Problem(
        spec="clipped_pg",
        head="logprobs",
        dtype=dtype,
        lengths=(60,),
        masks=("all",),
        hidden=1,
        vocab=9,
        scenario={"ratios": "extreme"},
        logit_std=30.0,
        **given,
    )
    return BoundProblem(SPECS["clipped_pg"], problem)


def test_tokens_out_of_range_are_masked() -> None:
    fine, bound = extreme("float32"), extreme("float16")
    assert largest(fine) > LARGEST
    assert largest(bound) < LARGEST
    assert 0 < int(bound.batch.fields["mask"].sum()) < int(fine.batch.fields["mask"].sum())


def test_so_are_those_out_of_range_of_a_stage_in_float16() -> None:
    assert largest(extreme("float32", rounded_to="tf32")) > LARGEST
    assert largest(extreme("float32", rounded_to="float16")) < LARGEST


def largest(bound: BoundProblem) -> float:
    return max(float(x.abs().max()) for x in bound.dense.outputs(bound.bound_spec).values())


def test_a_gradient_below_the_smallest_normal_number_may_be_rounded() -> None:
    """There numbers are 2^-24 apart, however small they are."""
    output = gradient_output("logits", ("token", "vocab"))
    generator = torch.Generator().manual_seed(0)
    reference = 2.0**-20 * (1 + torch.rand(8, 30, generator=generator, dtype=torch.float64))
    noise = FLOAT16.spacing * (torch.rand(12, 8, 30, generator=generator, dtype=torch.float64) - 0.5)
    tolerance = Tolerance(output, reference, noise, unit=FLOAT16.unit, rounding=FLOAT16.error, alike=FLOAT16.error)
    assert tolerance.compare(reference.half().double()).agrees
    assert not tolerance.compare(1.2 * reference.half().double()).agrees


def test_an_infinity_is_no_number_of_float16(make_world: MakeWorld) -> None:
    """Here a kernel enlarges gradients for a while, and the largest overflow."""
    right, world = in_float16("nll", "logits"), make_world("single")

    def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
        logits = scale_gradient(scale_gradient(inputs.logits, 2.0**-19), 2.0**19)
        return right(replace(inputs, logits=logits), options, mesh)

    sizes = {"lengths": (6,), "masks": ("all",), "hidden": 1, "vocab": 9, "options": {"reduction": "sum"}}
    problem = Problem(spec="nll", head="logits", dtype="float16", **sizes)  # pyright: ignore[reportArgumentType]
    assert run(right, problem, world).agrees
    result = run(replace(right, kernel=kernel), problem, world)
    assert any("entries are not finite; the reference is finite there" in finding for finding in result.findings)
