# SPDX-License-Identifier: Apache-2.0
"""Failure files: what a run found wrong can be shown again, also what no single problem shows."""

from pathlib import Path

import pytest

from lossgate import Layout
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.failure_files import read_failure
from lossgate.engine.replay import replay_failure
from lossgate.engine.run import run_cell
from lossgate.engine.settings import Settings
from lossgate.reports.failure_files import write_failure

LEANING = """
import torch, lossgate

@lossgate.candidate("nll", head="logits")
def right(inputs, options, mesh):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)

@lossgate.candidate("nll", head="logits")
def leaning(inputs, options, mesh):
    loss = right(inputs, options, mesh)
    return loss + 0.003 * (loss - loss.detach())
"""
"""A gradient that is 0.3% too large: less than one rounding to bfloat16 may do, in each problem."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("failures") / "kernels.py"
    file.write_text(LEANING)
    return file


@pytest.fixture(scope="module")
def biased(kernels: Path) -> CellResult:
    (leaning,) = load_candidates(f"{kernels}:leaning")
    return run_cell(Cell(leaning, Layout(), "bfloat16"), Settings(examples=30))


def test_a_bias_that_only_many_problems_show_is_written_with_all_of_them(biased: CellResult, tmp_path: Path) -> None:
    assert biased.verdict is Verdict.DISAGREE
    assert all(examination.agrees for examination in biased.examined)
    written = read_failure(write_failure(biased, tmp_path))
    assert written.pooled
    assert [example.problem for example in written.examples] == [examination.problem for examination in biased.examined]


def test_a_bias_that_only_many_problems_show_is_replayed(biased: CellResult, kernels: Path, tmp_path: Path) -> None:
    file = write_failure(biased, tmp_path)
    again = replay_failure(file)
    assert again.disagrees
    assert again.exact
    assert again.lines[1:3] == (f"  {biased.reasons[0]}", "  on: 30 problems together")
    assert not replay_failure(file, f"{kernels}:right").disagrees
