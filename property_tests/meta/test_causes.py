# SPDX-License-Identifier: Apache-2.0
"""A cause that several cells have is said once, with the layouts on which it shows."""

from dataclasses import replace
from typing import Any

import pytest

from lossgate.reports.causes import IN_COMMON, CausesSoFar, cause_of, causes_in_common, pattern
from lossgate.reports.describe import describe
from lossgate.reports.shown_cell import ShownCell, ShownVerdict

CAUSE = "cause: a sum over tp is missing"
SUM = (
    f"{CAUSE}; this explains all 9 failing problems (tp=2), and none of the 199 other known mistakes does",
    "to do: add it",
)


def shown(layout: str, causes: tuple[str, ...] = (), **changed: Any) -> ShownCell:
    whole = ShownCell(
        candidate="mine",
        held_to="agreement",
        dtype="float32",
        layout=layout,
        ranks=2,
        verdict=ShownVerdict("DISAGREE" if causes else "AGREE"),
        reasons=("loss: 2 times the reference",) if causes else (),
        causes=causes,
        problems=10,
        comparisons=20,
        margin=0.5,
        mde=1e-3,
        seconds=1.0,
    )
    return replace(whole, **changed)


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        (["tp=2", "dp=2,tp=2"], ["single", "dp=2"], "on every layout with tp > 1 that was tried: tp=2, dp=2,tp=2"),
        (["tp=2", "dp=2,tp=2"], ["single", "tp=4"], "on tp=2, dp=2,tp=2"),
        (["single", "tp=2"], [], "on every layout that was tried: single, tp=2"),
        (["single"], [], "on single"),
        (["cp=2"], ["cp=2"], "on cp=2"),
    ],
)
def test_the_pattern_of_layouts_is_said(wrong: list[str], right: list[str], words: str) -> None:
    assert pattern(wrong, right) == words


def test_a_cause_of_several_cells_is_said_once_for_a_candidate() -> None:
    cells = [shown("single"), shown("tp=2", SUM), shown("dp=2,tp=2", SUM), shown("tp=2", SUM, candidate="other")]
    assert causes_in_common(cells) == [
        IN_COMMON,
        "  mine: a sum over tp is missing: 2 cells, on every layout with tp > 1 that was tried: tp=2, dp=2,tp=2",
    ]
    assert causes_in_common(cells[:2]) == []


def test_the_second_cell_refers_to_the_first() -> None:
    so_far = CausesSoFar()
    first, second, other = (shown(layout, SUM) for layout in ("tp=2", "tp=4", "tp=2"))
    cause, held = SUM[0].split("; ")
    whole = [f"  {cause}", f"    {held}", f"  {SUM[1]}"]  # one idea a line
    assert describe(first, so_far)[-3:] == whole
    assert describe(second, so_far)[-1] == "  cause: the same as float32  tp=2"
    assert describe(replace(other, candidate="other"), so_far)[-3:] == whole
    assert describe(second)[-3:] == whole


@pytest.mark.parametrize("line", ["cause: none of 200 known mistakes explains it", "cause: not named, since only 2 of"])
def test_what_is_not_named_is_no_common_cause(line: str) -> None:
    assert cause_of(shown("single", (line,))) is None
    so_far = CausesSoFar()
    assert so_far.lines(shown("single", (line,))) == so_far.lines(shown("tp=2", (line,))) == (line,)
