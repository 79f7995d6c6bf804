# SPDX-License-Identifier: Apache-2.0
"""Tests of PyTorch's own kernels: the correct ones agree, and the known failures still disagree."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lossgate
from lossgate import Precision, Problem
from lossgate.cases.case import Case
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import load_candidates
from lossgate.engine.plan import plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.worlds import SimulatedWorld

ROOT = Path(__file__).parents[1]
PYTORCH = {candidate.name: candidate for candidate in load_candidates("lossgate.adapters.torch")}
PAGE = (ROOT / "docs/reference/known-failures.md").read_text()
KNOWN = load_candidates(str(ROOT / "ci/candidates/pytorch.py"))

test_cross_entropy = pytest.mark.slow(but=1)(
    lossgate.suite(PYTORCH["torch.cross_entropy"], layouts=["single", "dp=2,cp=2"])
)
if "torch.linear_cross_entropy" in PYTORCH:  # since 2.13
    test_linear_cross_entropy = pytest.mark.slow(but=1)(
        lossgate.suite(PYTORCH["torch.linear_cross_entropy"], layouts=["single", "cp=2"])
    )
    test_linear_cross_entropy_chunked = pytest.mark.slow(but=1)(
        lossgate.suite(PYTORCH["torch.chunked_linear_cross_entropy"], layouts=["single", "dp=2"])
    )
test_loss_parallel = pytest.mark.slow(but=1)(
    lossgate.suite(PYTORCH["torch.parallel_cross_entropy"], layouts=["single", "tp=2", "dp=2,tp=3"])
)


@pytest.mark.skipif("torch.linear_cross_entropy" not in PYTORCH, reason="it came with torch 2.13")
def test_the_accurate_policy_adds_up_a_bfloat16_loss_in_bfloat16() -> None:
    """docs/reference/known-failures.md says by how much it is too large, over 131 chunks."""
    coarse = Precision(accumulate="bfloat16", chunk=16, loss="bfloat16", grads_in_forward=True)
    kernel = replace(PYTORCH["torch.chunked_linear_cross_entropy"], precision={"bfloat16": coarse})
    sizes = {"lengths": (2085,), "masks": ("all",), "hidden": 1, "vocab": 2}
    problem = Problem(spec="nll", head="hidden", dtype="bfloat16", **sizes)
    (loss, *_) = Case(kernel, problem, SimulatedWorld(problem.layout)).comparisons
    assert loss.values["scale"] == pytest.approx(0.06, abs=0.005)
    assert not loss.agrees


@pytest.mark.parametrize("known", KNOWN, ids=[str(c.known_failure and c.known_failure.name) for c in KNOWN])
def test_known_failures_still_disagree_and_are_described(known: Candidate) -> None:
    (cell,) = plan([known], Settings())
    assert run_cell(cell, Settings()).record.expected
    assert known.known_failure is not None
    assert f"## {known.known_failure.name}" in PAGE


def test_the_page_says_which_are_in_this_version() -> None:
    header, _, *rows = (line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|"))
    column = header.index(".".join(torch.__version__.split(".")[:2]))
    stand = [name for name, *cells in rows if cells[column - 1] == "yes"]
    assert stand == sorted(c.known_failure.name for c in KNOWN if c.known_failure)
