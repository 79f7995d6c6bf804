# SPDX-License-Identifier: Apache-2.0
"""The README's kernel is wrong on several ranks. That is seen whatever the seed."""

from dataclasses import replace
from pathlib import Path

import pytest

from lossgate import Candidate, Layout
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES

from .markdown import ROOT, blocks_of


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Candidate:
    block = next(b for b in blocks_of(ROOT / "README.md") if b.directives.get("file") == "my_kernels.py")
    file: Path = tmp_path_factory.mktemp("readme") / "readme_kernels.py"
    file.write_text(block.text)
    (found,) = load_candidates(str(file))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["dp=2", "cp=2", "dp=2,cp=2"])
def test_a_loss_divided_by_the_rank_s_own_tokens_is_seen(kernel: Candidate, layout: str, dtype: str, seed: int) -> None:
    settings = replace(PROFILES["dev"], seed=seed, shrink_calls=0)
    result = run_cell(Cell(kernel, Layout.parse(layout), dtype), settings)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    assert "loss" in result.failure.symptoms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_one_rank_it_is_right(kernel: Candidate, dtype: str) -> None:
    result = run_cell(Cell(kernel, Layout(), dtype), PROFILES["dev"])
    assert result.verdict is Verdict.AGREE, result.reasons
