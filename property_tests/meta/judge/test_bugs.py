# SPDX-License-Identifier: Apache-2.0
"""Kernels with known bugs disagree, and the report says what differs."""

import pytest

from kernel_bank.bugs import BUGS, CROSS_ENTROPY_BUGS, cross_entropy_with
from kernel_bank.cross_entropy import STYLES, Style, make

from .checks import ALL_STYLES, IDS, MakeWorld, make_problem, run


@pytest.mark.parametrize("bug", CROSS_ENTROPY_BUGS)
@pytest.mark.parametrize(("dtype", "style"), ALL_STYLES[:-1], ids=IDS[:-1])
def test_bugs_disagree(make_world: MakeWorld, dtype: str, style: Style, bug: str) -> None:
    """Each bug shows on one middle-sized problem.

    ``benchmarks/calibration.py`` counts how often it shows on random problems.
    """
    layout = {"tp all-reduce missing": "tp=2", "cp gradient x cp": "cp=2"}.get(bug, "single")
    changes: dict[str, object] = {}
    if bug == "bf16 accumulation of dW":  # its errors need many tokens to add up
        changes = {"lengths": (160,), "masks": ("all",), "vocab": 32, "hidden": 16}
    problem, world = make_problem(dtype, layout, **changes), make_world(layout)
    assert not run(cross_entropy_with(style, bug), problem, world).agrees
    assert run(make(style), problem, world).agrees


@pytest.mark.parametrize("bug", [name for name in BUGS if name not in CROSS_ENTROPY_BUGS])
def test_bugs_that_need_several_ranks_disagree_on_them_alone(make_world: MakeWorld, bug: str) -> None:
    """Every bug of the bank is seen. On one rank these are no bugs."""
    layout = {"label at a shard boundary lost": "tp=2", "local denominator": "dp=2"}[bug]
    wrong = BUGS[bug].put_into(make(STYLES["float32"][1]))
    for where, agrees in ((layout, False), ("single", True)):
        split = {"lengths": (12, 9), "masks": ("all", "holes"), "vocab": 32, "forced_labels": ((2, 16),)}
        assert run(wrong, make_problem("float32", where, **split), make_world(where)).agrees is agrees


def test_a_disagreement_in_words(make_world: MakeWorld) -> None:
    wrong = cross_entropy_with(STYLES["bfloat16"][0], "dX x1.01")
    result = run(wrong, make_problem("bfloat16"), make_world("single"))
    # The bug rounds the gradient to bfloat16 once more, after it is multiplied by 1.01.
    assert result.findings[0].startswith("grad of hidden: got ")
    assert result.statistics[0].startswith("grad of hidden: 1.009")
    assert "times the reference; rounding explains 1 +- 0.004" in result.statistics[0]
