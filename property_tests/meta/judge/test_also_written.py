# SPDX-License-Identifier: Apache-2.0
"""A loss that a spec says is also written otherwise has the noise of all its ways."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

import lossgate
from lossgate import Candidate, Outputs, Spec, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import sample_problems
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.cell_record import Verdict
from lossgate.engine.plan import plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.judge.comparison import Comparison
from lossgate.judge.ensemble import rounded_runs, run_ensemble, stages_of
from lossgate.losses import SPECS
from lossgate.specs.outputs import LOSS

from .checks import MakeWorld, run


class Targets(lossgate.Batch):
    targets: Tensor = lossgate.field("token", "log-probabilities to come near to", draw=lambda c: c.logprobs + 1e-3)


def mean(of_tokens: Tensor, batch: Any) -> Tensor:
    return torch.where(batch.mask, of_tokens, 0.0).sum() / batch.valid_tokens.clamp(min=1)


def squared(values: Any, batch: Any, options: Any) -> Tensor:
    """The squared distance of log-probabilities from their targets."""
    return mean((values.logprobs - batch.targets) ** 2, batch)


def expanded(values: Any, batch: Any, options: Any) -> Tensor:
    x, y = values.logprobs, batch.targets
    return mean(x * x - 2 * x * y + y * y, batch)


def declared(*ways: Any) -> Spec:
    return lossgate.spec("squared", batch=Targets, heads=("logprobs",), also_written=ways)(squared)


def kernel(spec: Spec) -> Candidate:
    @candidate(spec, head="logprobs", dtypes=("float32",))
    def of_terms(inputs: Any, options: Any, mesh: Any) -> Outputs:
        return Outputs(loss=expanded(inputs, inputs, options))

    return of_terms


@pytest.mark.parametrize(("ways", "agree"), [((), False), ((expanded,), True)])
def test_a_kernel_in_that_way_agrees_only_if_it_is_said(
    make_world: MakeWorld, ways: tuple[Any, ...], agree: bool
) -> None:
    spec = declared(*ways)
    own, world = kernel(spec), make_world("single")
    problems = sample_problems(own, world.layout, "float32", 12, seed=0)
    assert all(run(own, problem, world).agrees for problem in problems) is agree


def test_every_second_member_takes_the_second_way() -> None:
    spec = declared(expanded)
    (problem,) = sample_problems(kernel(spec), lossgate.Layout(), "float32", 1, seed=0)
    bound, own = BoundProblem(spec, problem), kernel(spec)
    runs = rounded_runs(bound.batch, stages_of(own, "float32"), "seed")
    losses = run_ensemble(own.starts_at, bound.batch, bound.bound_spec, runs).outputs[LOSS]
    off = (losses - bound.reference((LOSS,))[LOSS]).abs()
    assert float(off[1::2].median()) > 10 * float(off[0::2].median())


def underflowing(values: Any, batch: Any, options: Any) -> Tensor:
    """In float32 it is 0 * log(0); the reference has float64, where nothing underflows."""
    tiny = (values.logprobs.detach() * 0 - 200).exp()
    return squared(values, batch, options) + mean(tiny * tiny.log(), batch)


def test_a_way_that_is_nan_says_nothing_of_a_kernel(make_world: MakeWorld) -> None:
    """A NaN is over no limit and under none, so anything would be within NaN."""
    own, world = kernel(declared(underflowing)), make_world("single")
    (problem,) = sample_problems(own, world.layout, "float32", 1, seed=0)
    (loss, _) = run(own, problem, world).comparisons
    assert loss.vacuous
    assert not loss.tells_scale
    not_a_number = replace(own, kernel=lambda *given: Outputs(loss=own.kernel(*given).loss * nan))
    assert not run(not_a_number, problem, world).agrees


def test_if_all_problems_say_nothing_the_cell_is_inconclusive() -> None:
    settings = Settings(layouts=("single",), properties=("agreement",), examples=4, rounds=1)
    own = replace(kernel(declared(underflowing)), kernel=lambda x, options, mesh: Outputs(loss=squared(x, x, options)))
    (cell,) = plan([own], settings)
    found = run_cell(cell, settings)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert any("loss" in reason for reason in found.reasons)


def test_a_statistic_that_is_nan_disagrees() -> None:
    assert not Comparison(output=LOSS, values={"scale": 0.0, "worst": nan}, limits={"scale": 1.0, "worst": 1.0}).agrees
    assert not Comparison(output=LOSS, values={"scale": 0.0, "worst": 0.0}, limits={"scale": 1.0, "worst": nan}).agrees


@pytest.mark.parametrize("head", ["hidden", "logits"])
def test_all_ways_of_a_divergence_are_finite_on_sure_students(head: str) -> None:
    """Where student and teacher both underflow, so does their mixture."""
    own = dense_candidate(SPECS["divergence"], head)
    sure = {"logit_std": 30.0, "scenario": {"teacher": "near"}, "options": {"divergence_type": "jsd", "beta": 0.1}}
    for drawn in sample_problems(own, lossgate.Layout(), "float32", 4, seed=0):
        bound = BoundProblem(own.spec, replace(drawn, **sure, masks=("all",) * len(drawn.lengths)))
        runs = rounded_runs(bound.batch, stages_of(own, "float32"), "seed")
        ensemble = run_ensemble(own.starts_at, bound.batch, bound.bound_spec, runs)
        assert all(bool(one.isfinite().all()) for one in ensemble.outputs.values())
