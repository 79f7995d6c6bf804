# SPDX-License-Identifier: Apache-2.0
"""Of the kernels that come along for a first try one is right, and one wrong, whatever the seed."""

from dataclasses import replace

import pytest

from lossgate import Layout
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import PROFILES, Settings
from lossgate.tour import chunked, of_own_tokens

SETTINGS = [replace(PROFILES["dev"], seed=seed, shrink_calls=0) for seed in range(3)]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings.seed))
@pytest.mark.parametrize("layout", ["single", "dp=2", "cp=2", "dp=2,cp=2"])
def test_the_right_one_agrees(layout: str, settings: Settings) -> None:
    result = run_cell(Cell(chunked, Layout.parse(layout), "float32"), settings)
    assert result.verdict is Verdict.AGREE, result.reasons


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings.seed))
@pytest.mark.parametrize("layout", ["dp=2", "cp=2", "dp=2,cp=2"])
def test_the_wrong_one_is_found(layout: str, settings: Settings) -> None:
    result = run_cell(Cell(of_own_tokens, Layout.parse(layout), "float32"), settings)
    assert result.verdict is Verdict.DISAGREE
    assert result.failure is not None
    assert "loss" in result.failure.symptoms
