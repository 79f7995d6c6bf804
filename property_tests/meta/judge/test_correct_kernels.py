# SPDX-License-Identifier: Apache-2.0
"""Correct kernels of every style agree, and the judge states how small an error it would see."""

import pytest

from kernel_bank.cross_entropy import Style, make
from lossgate.cases.placement import sample_problems

from .checks import ALL_STYLES, IDS, MakeWorld, make_problem, run


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES, ids=IDS)
@pytest.mark.parametrize("layout", ["single", "tp=2", "dp=2,cp=2"])
def test_correct_kernels_agree(make_world: MakeWorld, dtype: str, style: Style, layout: str) -> None:
    """This is a sample of what ``benchmarks/calibration.py`` counts."""
    kernel, world = make(style), make_world(layout)
    for problem in sample_problems(kernel, world.layout, dtype, 25, seed=11):
        result = run(kernel, problem, world)
        assert result.agrees, (result.findings, problem.to_json())
        assert not any(comparison.blind for comparison in result.comparisons)


@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES[:-1], ids=IDS[:-1])
def test_minimum_detectable_effects_are_small(make_world: MakeWorld, dtype: str, style: Style) -> None:
    result = run(make(style), make_problem(dtype), make_world("single"))
    assert max(comparison.mde for comparison in result.comparisons) < {"float32": 1e-5, "bfloat16": 0.01}[dtype]
