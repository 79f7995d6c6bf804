# SPDX-License-Identifier: Apache-2.0
"""A kernel that draws random numbers gets others on each problem, and the same ones in each run."""

import random
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from lossgate import Layout, candidate
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.loading import load_candidates
from lossgate.dense_candidates import dense_candidate
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Verdict
from lossgate.engine.events import CellFinished
from lossgate.engine.run import run
from lossgate.engine.settings import Settings
from lossgate.losses import SPECS
from lossgate.properties import PROPERTIES
from lossgate.worlds import SimulatedWorld

MakeWorld = Callable[..., SimulatedWorld]

DRAW = {"torch": lambda: torch.rand(()).item(), "python": random.random, "numpy": numpy.random.random}


@pytest.mark.parametrize("source", DRAW)
def test_each_problem_has_random_numbers_of_its_own(source: str, make_world: MakeWorld) -> None:
    """Those of the process stay as they were."""
    drawn, dense = list[float](), dense_candidate(SPECS["nll"], "logits")

    def kernel(inputs: Any, options: Any, mesh: Any) -> Any:
        drawn.append(DRAW[source]())
        return dense.kernel(inputs, options, mesh)

    declared = candidate("nll", head="logits", dtypes=("float32",), axes=("dp",))(kernel)
    world, problems = make_world("dp=2"), sample_problems(declared, Layout(dp=2), "float32", 8, 0)
    numpy.random.set_bit_generator(numpy.random.MT19937(0))  # ranks draw from another
    torch_was, python_was, numpy_was = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    for _ in range(2):
        for problem in problems:
            assert run_case(Case(declared, problem, world), PROPERTIES["agreement"]).agrees
    by_rank = drawn[::2], drawn[1::2]
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][:8] == by_rank[0][8:]
    assert len({*drawn}) == len({problem.to_json() for problem in problems}) > 1
    assert torch.equal(torch.get_rng_state(), torch_was)
    assert random.getstate() == python_was
    assert repr(numpy.random.get_state()) == repr(numpy_was)


class RoundsAtRandom(torch.autograd.Function):
    """Moves about half of the entries by a unit in the last place, and half of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (1 + torch.finfo(x.dtype).eps * (torch.rand_like(x) < 0.5))

    backward = forward  # pyright: ignore[reportAssignmentType]


@pytest.mark.slow
def test_a_right_kernel_that_rounds_at_random_keeps_every_property(make_world: MakeWorld) -> None:
    """Two calls are compared bit by bit only if both draw the same."""

    @candidate("nll", head="logits", dtypes=("float32",), axes=("dp",))
    def kernel(inputs: Any, options: Any, mesh: Any) -> Tensor:
        targets = inputs.labels.masked_fill(~inputs.mask, -100)
        rounded = RoundsAtRandom.apply(inputs.logits)
        return torch.nn.functional.cross_entropy(rounded, targets, reduction="sum") / inputs.valid_tokens.clamp(min=1)

    for problem in sample_problems(kernel, Layout(dp=2), "float32", 4, 0):
        case = Case(kernel, problem, make_world("dp=2"))
        held_to = [held_to for held_to in PROPERTIES.values() if held_to.applies(kernel)]
        found = [run_case(case, one).findings for one in held_to]
        assert not any(found)


WRONG_NOW_AND_THEN = """
import torch, lossgate

@lossgate.candidate("nll", head="logprobs", dtypes=("float32",))
def now_and_then(inputs, options, mesh):
    total = -inputs.logprobs.masked_fill(~inputs.mask, 0).sum()
    return total / inputs.valid_tokens.clamp(min=1) * (1.05 if torch.rand(()) < 0.3 else 1)
"""


@pytest.mark.slow
def test_a_kernel_that_is_wrong_now_and_then_is_told_how_often(tmp_path: Path) -> None:
    """Each run says the same, and one in this process is told, too."""
    file = tmp_path / "chance.py"
    file.write_text(WRONG_NOW_AND_THEN)
    (kernel,) = load_candidates(f"{file}:now_and_then")
    settings = Settings(layouts=("single",), dtypes=("float32",), examples=12, rounds=1, shrink_calls=20, jobs=1)
    reasons: list[tuple[str, ...]] = []
    for here in (False, True, True):
        with closing(run([kernel], settings, here=here)) as events:
            (result,) = [event.result for event in events if isinstance(event, CellFinished)]
        assert result.verdict is Verdict.DISAGREE
        reasons.append(result.reasons)
    assert reasons[1] == reasons[2]
    for said, where in zip(reasons, ("in a fresh process", "with other random numbers"), strict=False):
        told = rf"not wrong in every call: {where} this problem disagreed in (\d+) of 20 calls"
        (often,) = re.findall(told, "\n".join(said))
        assert 0 < int(often) < 15
