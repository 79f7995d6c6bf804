# SPDX-License-Identifier: Apache-2.0
"""A loss that a spec says is also written otherwise has the noise of all its ways."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lossgate
from lossgate import Candidate, Outputs, Spec, candidate
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.placement import sample_problems
from lossgate.judge.ensemble import rounded_runs, run_ensemble, stages_of
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
