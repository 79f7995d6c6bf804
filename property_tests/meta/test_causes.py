# SPDX-License-Identifier: Apache-2.0
"""A cause that several cells have is said once, with the layouts on which it shows."""

from typing import Any

import pytest
from msgspec.structs import replace

from lossgate.engine.cell_record import CellRecord, Verdict
from lossgate.reports.causes import IN_COMMON, CausesSoFar, causes_in_common, layouts_in_words
from lossgate.reports.describe import describe
from property_tests.meta.made_evidence import cell

CAUSE = "a sum over tp is missing"
EXPLAINS = "this explains all 9 failing problems (tp=2), and none of the 199 other known mistakes does"
SUM = {"causes": (f"cause: {CAUSE}; {EXPLAINS}", "to do: add it"), "cause": CAUSE, "explains": EXPLAINS}


def shown(layout: str, **changed: Any) -> CellRecord:
    """Returns a cell of a candidate, which disagrees if it has causes."""
    wrong = {"verdict": Verdict.DISAGREE, "reasons": ("loss: 2 times the reference",)} if "causes" in changed else {}
    return cell(layout=layout, **{"candidate": "mine"} | wrong | changed)


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
    assert layouts_in_words(wrong, right) == words


def test_a_cause_of_several_cells_is_said_once_for_a_candidate() -> None:
    cells = [
        shown("single"),
        shown("tp=2", **SUM),
        shown("dp=2,tp=2", **SUM),
        shown("tp=2", **SUM | {"candidate": "other"}),
    ]
    assert causes_in_common(cells) == [
        IN_COMMON,
        "  mine: a sum over tp is missing: 2 cells, on every layout with tp > 1 that was tried: tp=2, dp=2,tp=2",
    ]
    assert causes_in_common(cells[:2]) == []


def test_the_second_cell_refers_to_the_first() -> None:
    so_far = CausesSoFar()
    first, second, other = (shown(layout, **SUM) for layout in ("tp=2", "tp=4", "tp=2"))
    whole = [f"  cause: {CAUSE}", f"    {EXPLAINS}", "  to do: add it"]  # one idea a line
    assert describe(first, so_far)[-3:] == whole
    assert describe(second, so_far)[-1] == "  cause: the same as float32  tp=2"
    assert describe(replace(other, candidate="other"), so_far)[-3:] == whole
    assert describe(second)[-3:] == whole


@pytest.mark.parametrize("line", ["cause: none of 200 known mistakes explains it", "cause: not named, since only 2 of"])
def test_what_is_not_named_is_no_common_cause(line: str) -> None:
    lines = (line, "where: at the first token")
    so_far, cells = CausesSoFar(), [shown(layout, causes=lines) for layout in ("single", "tp=2")]
    assert [so_far.lines(one) for one in cells] == [lines, lines]
    assert causes_in_common(cells) == []
