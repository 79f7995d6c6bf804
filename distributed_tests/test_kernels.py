# SPDX-License-Identifier: Apache-2.0
"""Every kernel of ours, and kernels with planted bugs, on real process groups."""

from pathlib import Path

import pytest

from lossgate import Layout
from lossgate.base.launch import launch_of_torchrun
from lossgate.cases.case import Case
from lossgate.cases.placement import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.worlds import make_world, most_ranks

ROOT = Path(__file__).parents[1]
OURS = [
    *load_candidates(str(ROOT / "ci/candidates/ours.py")),
    *load_candidates(str(ROOT / "ci/candidates/frameworks.py") + ":fused_linear_logprobs_of_rows"),
]
PLANTED = load_candidates(str(Path(__file__).with_name("wrong_kernels.py")))
WORLD = "torchrun" if launch_of_torchrun() else "gloo"
LAYOUTS = (
    *("tp=2", "cp=2", "dp=2"),
    *("tp=4", "cp=4", "dp=4", "cp=2,tp=2", "dp=2,tp=2", "dp=2,cp=2"),
    *("dp=2,cp=2,tp=2", "tp=8"),
)
PROBLEMS = 3


def layouts_of(candidate: Candidate) -> list[Layout]:
    layouts = [Layout.parse(text) for text in LAYOUTS]
    return [layout for layout in layouts if set(layout.axes) <= set(candidate.axes)]


@pytest.mark.slow(but=8)
@pytest.mark.parametrize(
    ("candidate", "layout"),
    [pytest.param(one, layout, id=f"{one.name}-{layout}") for one in OURS for layout in layouts_of(one)],
)
def test_our_kernels_agree(candidate: Candidate, layout: Layout) -> None:
    if layout.ranks > (most := most_ranks(WORLD)):
        pytest.skip(f"torchrun launched {most} ranks")
    world = make_world(WORLD, layout)
    for dtype in candidate.dtypes:
        problems = sample_problems(candidate, layout, dtype, PROBLEMS, seed=layout.ranks)
        assert problems
        for problem in problems:
            wrong = [str(c.output) for c in Case(candidate, problem, world).comparisons if not c.agrees]
            assert not wrong, problem.describe()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("candidate", PLANTED, ids=lambda candidate: candidate.name)
def test_planted_bugs_are_found_with_the_same_problem(candidate: Candidate) -> None:
    """Simulated ranks and processes shrink to one problem, with one finding."""
    settings = Settings(examples=5, rounds=1)
    layout, found = Layout(cp=2, tp=2), list[tuple[object, ...]]()
    for world in ("simulated", WORLD):
        result = run_cell(Cell(candidate, layout, "float32", world=world), settings)
        assert (result.verdict is Verdict.DISAGREE) == (candidate.name != "right")
        found.append((result.failure and result.failure.problem, result.failure and result.failure.symptoms))
    assert found[0] == found[1]
