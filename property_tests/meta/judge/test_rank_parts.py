# SPDX-License-Identifier: Apache-2.0
"""Each rank rounds its own part of a number, and the judge knows it.

The means of returns and values have parts of either sign, which cancel.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lossgate import Candidate, Layout, Outputs, Precision, Problem
from lossgate.cases import oracle
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.placement import PlacedProblem, sample_problems
from lossgate.cases.rank_parts import RankParts, rank_parts
from lossgate.dense_candidates import dense_candidate
from lossgate.judge.comparison import Comparison
from lossgate.judge.ensemble import stages_of
from lossgate.losses import SPECS
from lossgate.numerics.float_formats import FLOAT_FORMATS
from lossgate.worlds import SimulatedWorld

from .checks import MakeWorld, run

DENSE = dense_candidate(SPECS["value"], "values")


def returns_parts(dense: Candidate = DENSE) -> Candidate:
    """Returns a kernel in float32 that returns its parts in bfloat16."""

    def kernel(inputs: Any, options: Any, mesh: Any) -> Outputs:
        outputs = dense.kernel(inputs, options, mesh)
        assert isinstance(outputs, Outputs)
        assert outputs.loss is not None
        metrics = {name: metric.bfloat16() for name, metric in outputs.metrics.items()}
        return replace(outputs, loss=outputs.loss.bfloat16(), metrics=metrics, logprobs=None)

    precision = {"bfloat16": Precision(returned="bfloat16")}
    return replace(dense, kernel=kernel, precision=precision, dtypes=("bfloat16",), name="returns parts")


def problem(seed: int, dtype: str = "bfloat16", layout: str = "dp=4") -> Problem:
    """Returns a problem with a sequence of four tokens for each rank."""
    four: dict[str, Any] = {"lengths": (4,) * 4, "masks": ("all",) * 4, "hidden": 1, "vocab": 2}
    return Problem(spec="value", head="values", dtype=dtype, layout=Layout.parse(layout), seed=seed, **four)


def metrics(kernel: Candidate, world: SimulatedWorld) -> list[Comparison]:
    compared = (c for seed in (25, 26, 30, 39) for c in run(kernel, problem(seed), world).comparisons)
    return [comparison for comparison in compared if comparison.output.kind == "metric" and comparison.values]


def test_parts_that_cancel_are_rounded(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """If runs round the whole alone, a right kernel disagrees."""
    kernel, world = returns_parts(), make_world("dp=4")
    assert max(c.margin for c in metrics(kernel, world)) < 0.5
    monkeypatch.setattr(oracle, "rank_parts", lambda *_: {})
    assert max(c.margin for c in metrics(kernel, world)) > 1


def test_a_part_that_is_wrong_disagrees(make_world: MakeWorld) -> None:
    """The first rank's parts are 10% too large."""
    right = returns_parts()

    def kernel(inputs: Any, options: Any, mesh: Any) -> Outputs:
        outputs = right.kernel(inputs, options, mesh)
        assert isinstance(outputs, Outputs)
        factor = 1.1 if mesh.get_rank() == 0 else 1.0
        return replace(outputs, metrics={name: metric * factor for name, metric in outputs.metrics.items()})

    found = metrics(replace(right, kernel=kernel), make_world("dp=4"))
    assert sum(not comparison.agrees for comparison in found) > len(found) / 4


def test_parts_of_pairs_are_rounded(make_world: MakeWorld) -> None:
    """If runs round the whole alone, a right kernel disagrees."""
    kernel, world = returns_parts(dense_candidate(SPECS["preference"], "rewards")), make_world("dp=4")
    for problem in sample_problems(kernel, world.layout, "bfloat16", 12, seed=0):
        assert run(kernel, problem, world).agrees


@pytest.mark.parametrize("layout", ["dp=4", "dp=2,cp=2"])
@pytest.mark.parametrize(("spec", "head"), [("preference", "rewards"), ("dpo", "logprobs")])
def test_all_numbers_of_pairs_have_parts(spec: str, head: str, layout: str) -> None:
    """A pair without tokens counts, too, unless the mask of sequences says otherwise. All cp ranks
    compute the same of whole sequences.
    """
    kernel = returns_parts(dense_candidate(SPECS[spec], head))
    stages = stages_of(kernel, "bfloat16")
    for problem in sample_problems(kernel, Layout.parse(layout), "bfloat16", 4, seed=0):
        bound = BoundProblem(kernel.spec, problem)
        numbers = {output: value for output, value in bound.reference(()).items() if not output.dims}
        parts = rank_parts(kernel, PlacedProblem(bound, problem), stages, (), numbers)
        assert parts.keys() == numbers.keys(), problem


def limits(kernel: Candidate, bound: BoundProblem, layout: str) -> dict[str, float]:
    """Returns the limit of each number on a layout."""
    world = SimulatedWorld(Layout.parse(layout))
    case = Case(kernel, replace(bound.problem, layout=world.layout), world, bound)
    found = {str(c.output): c.limits["scale"] for c in case.comparisons if c.values and not c.output.dims}
    world.close()
    return found


def test_a_limit_is_that_of_its_layout() -> None:
    """Limits of numbers are kept with a problem for all layouts, but for those with parts."""
    kernel = returns_parts()
    bound = BoundProblem(kernel.spec, problem(30))
    once, split, again = (limits(kernel, bound, layout) for layout in ("single", "dp=4", "single"))
    assert once == again
    assert once.keys() == split.keys()
    assert all(split[name] > 0.9 * limit for name, limit in once.items())
    assert any(split[name] > 10 * limit for name, limit in once.items())


def test_in_float32_no_limit_changes() -> None:
    bound = BoundProblem(DENSE.spec, problem(30, "float32"))
    assert limits(DENSE, bound, "single") == limits(DENSE, bound, "dp=4")


@pytest.mark.parametrize("own_sum", [False, True], ids=["returned", "added up by the kernel"])
def test_runs_are_as_far_off_as_sums_of_rounded_parts(own_sum: bool) -> None:
    """They are compared with real rounding of parts that hardly differ. Partial sums are larger
    here than parts.
    """
    parts = torch.tensor([100.0, 90.0, -80.0, -109.0], dtype=torch.float64)
    drawn = torch.Generator().manual_seed(0)
    near = parts * (1 + 0.1 * torch.rand(4000, 4, generator=drawn, dtype=torch.float64))
    total = torch.zeros(4000, dtype=torch.bfloat16 if own_sum else torch.float64)
    for part in near.bfloat16().unbind(1):
        total = total + part
    real = (total.double() - near.sum(1)).square().mean().sqrt()
    runs = RankParts(parts, FLOAT_FORMATS["bfloat16"], own_sum, seed=0).noise(4000)
    assert 0.8 < float(runs.square().mean().sqrt() / real) < 1.25
    assert abs(float(runs.mean())) < 0.1 * float(real)
