# SPDX-License-Identifier: Apache-2.0
"""The cause comes first. Cells that fail alike are one entry, with the layouts on which they do."""

from typing import Any

import pytest

from lossgate.engine.cell_record import CellRecord, Failure, PropertyRecord, Verdict
from lossgate.reports.describe import describe
from lossgate.reports.stories import Stories, layouts_in_words
from property_tests.meta.made_evidence import cell

CAUSE = "a sum over tp is missing"
EXPLAINS = "this explains all 9 failing problems (tp=2), and none of the 199 other known mistakes does"
SUM = {"causes": (f"cause: {CAUSE}", "to do: add it"), "cause": CAUSE, "explains": EXPLAINS}
PLAIN = "loss: got 2, want 1; absolute difference 1, relative difference 1"
STATISTIC = "loss: 2 times the reference; rounding explains 1 +- 1e-07"
FAILURE = Failure(problem={}, description="3 tokens", findings=(PLAIN,), symptoms=("loss",), statistics=(STATISTIC,))
NONE = "cause: none of 200 known mistakes explains it"


def shown(layout: str, **changed: Any) -> CellRecord:
    """Returns a cell of a candidate, which disagrees if it has causes."""
    wrong = {"verdict": Verdict.DISAGREE, "reasons": (PLAIN,), "failure": FAILURE} if "causes" in changed else {}
    return cell(layout=layout, **{"candidate": "mine", "replay": None} | wrong | changed)


@pytest.mark.parametrize(
    ("wrong", "right", "words"),
    [
        (["tp=2", "dp=2,tp=2"], ["single", "dp=2"], "on every layout with tp > 1 that was tried: tp=2; dp=2,tp=2"),
        (["tp=2", "dp=2,tp=2"], ["single", "tp=4"], "on tp=2; dp=2,tp=2"),
        (["single", "tp=2"], [], "on every layout that was tried: single; tp=2"),
        (["single"], [], "on single"),
        (["cp=2"], ["cp=2"], "on cp=2"),
    ],
)
def test_the_pattern_of_layouts_is_said(wrong: list[str], right: list[str], words: str) -> None:
    assert layouts_in_words(wrong, right) == words


def test_the_cause_comes_first_then_the_numbers_and_statistics_only_if_they_are_wanted() -> None:
    one = shown("tp=2", **SUM)
    first = [f"  cause: {CAUSE}", "  to do: add it", f"  {PLAIN}"]
    assert describe(one) == [*first, "  on: 3 tokens"]
    assert describe(one, whole=True) == [*first, f"  {STATISTIC}", f"  {EXPLAINS}", "  on: 3 tokens"]
    assert one.first_told == f"cause: {CAUSE}; to do: add it"
    assert one.why == f"cause: {CAUSE}; to do: add it; {PLAIN}"


def test_without_a_cause_a_place_comes_first_and_that_there_is_none_comes_last() -> None:
    one = shown("tp=2", causes=(NONE, "where: at the first token"))
    assert one.told == ("where: at the first token", PLAIN, NONE)
    assert one.first_told == "where: at the first token"
    assert shown("tp=2", causes=(NONE,)).told == (PLAIN, NONE)


def test_of_a_property_the_first_line_says_what_to_do() -> None:
    wrong = PropertyRecord(name="frozen", findings=("the kernel raised\n  at k.py", "also"), remedy="skip it")
    one = shown("single", causes=(), reasons=wrong.reasons, properties=(wrong,))
    assert one.told == wrong.reasons
    assert one.first_told == "property frozen: the kernel raised; to do: skip it"


@pytest.mark.parametrize("causes", [SUM, {"causes": (NONE,), "symptoms": ("loss",)}], ids=["named", "not named"])
def test_cells_that_fail_alike_are_one_entry(causes: dict[str, Any]) -> None:
    """Without a cause these have the same outputs wrong."""
    other = PLAIN.replace("1", "7") + " (got 1, want 2 at token 3)"
    stories = Stories()
    cells = [
        shown("single"),
        shown("tp=2", **causes),
        shown("dp=2,tp=2", **causes, reasons=(other,)),
        shown("tp=2", **causes, dtype="bfloat16"),
        shown("tp=2", **causes, candidate="other"),
    ]
    lines = [line for one in cells for line in stories.of(one, listed=False)] + [*stories.end()]
    at = lines.index(
        "  alike: 3 cells, float32 on every layout with tp > 1 that was tried: tp=2; dp=2,tp=2, bfloat16 "
        "on every layout with tp > 1 that was tried: tp=2"
    )
    assert [line for line in lines[:at] if "DISAGREE" in line] == ["[bold red]DISAGREE[/]  mine  float32  tp=2"]
    assert lines[at + 1] == "[bold red]DISAGREE[/]  other  float32  tp=2"


def test_a_line_says_which_cell_it_is_like() -> None:
    stories = Stories()
    found = [[*stories.of(shown(layout, **SUM), listed=True)] for layout in ("tp=2", "tp=4")]
    assert found[1] == ["[bold red]DISAGREE[/]  mine  float32  tp=4  like float32  tp=2"]


def test_a_cell_of_a_property_names_it() -> None:
    (first, *_) = Stories().of(shown("tp=2", **SUM, property="frozen"), listed=True)
    assert first == "[magenta]PROMISE BROKEN[/]  mine  frozen  float32  tp=2: 1 promise broken: frozen"
