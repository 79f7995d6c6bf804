# SPDX-License-Identifier: Apache-2.0
"""Tests of failure files: any disagreement can be shown again, also one of pooled problems only."""

from pathlib import Path

import pytest

from lossgate import Layout, UsageError
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, CellResult, Verdict
from lossgate.engine.failure_files import read_failure, write_failure
from lossgate.engine.judge_again import replay_failure
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings

pytestmark = pytest.mark.xdist_group("failures")  # one worker makes what its tests share

KERNELS = """
import torch, lossgate

@lossgate.candidate("nll", head="logits")
def right(inputs, options, mesh):
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total / inputs.valid_tokens.clamp(min=1)

@lossgate.candidate("nll", head="logits")
def biased(inputs, options, mesh):
    loss = right(inputs, options, mesh)
    return loss + 0.002 * (loss - loss.detach())
"""
"""The gradient of ``biased`` is 0.2% too large; one rounding to bfloat16 may change it by more."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("failures") / "kernels.py"
    file.write_text(KERNELS)
    return file


@pytest.fixture(scope="module")
def pooled(kernels: Path) -> CellResult:
    (biased,) = load_candidates(f"{kernels}:biased")
    return run_cell(Cell(biased, Layout(), "bfloat16"), Settings(examples=30))


def test_a_bias_that_only_pooled_problems_show_is_written_with_all_of_them(pooled: CellResult, tmp_path: Path) -> None:
    assert pooled.verdict is Verdict.DISAGREE
    assert all(case.agrees for case in pooled.cases)
    written = read_failure(write_failure(pooled, tmp_path))
    assert written.pooled
    assert [example.problem for example in written.examples] == [case.problem for case in pooled.cases]


def test_a_bias_that_only_pooled_problems_show_is_replayed(pooled: CellResult, kernels: Path, tmp_path: Path) -> None:
    file = write_failure(pooled, tmp_path)
    again = replay_failure(read_failure(file))
    assert again.disagrees
    assert again.exact
    assert again.lines()[1:-1] == (*(f"  {reason}" for reason in pooled.reasons), "  on: 30 problems, pooled")
    assert not replay_failure(read_failure(file), f"{kernels}:right").disagrees
    with pytest.raises(UsageError, match=r"timeout=0\.0: expected a positive number"):
        replay_failure(read_failure(file), timeout=0.0)


def test_a_file_of_a_version_with_other_fields_is_refused(kernels: Path, tmp_path: Path) -> None:
    """Ignoring a field would replay another problem: one without the label boost, say."""
    (wrong,) = load_candidates(f"{kernels}:biased")
    result = run_cell(Cell(wrong, Layout(), "bfloat16"), Settings(examples=40))
    file = write_failure(result, tmp_path)
    file.write_text(file.read_text().replace('"label_boost"', '"confidence"'))
    with pytest.raises(UsageError, match="no failure file of this version of lossgate: problem: unknown field 'confi"):
        read_failure(file)
