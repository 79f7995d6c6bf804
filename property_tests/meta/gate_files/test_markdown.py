# SPDX-License-Identifier: Apache-2.0
"""Tests of the comment on a pull request, which are made on the page that it renders to."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lossgate.gate.gate_verdict import GatedCell, GateReason, GateVerdict
from lossgate.reports.gate_files.markdown import MARKER, Comment, code, code_block, markdown
from property_tests.meta.gate_files.verdicts import (
    EXEMPT as EXEMPT_RECORDS,
)
from property_tests.meta.gate_files.verdicts import (
    HOSTILE,
    ISSUE,
    VERDICTS,
    agreeing,
    blocked,
    excused,
    hostile,
    key,
    many,
    of_gate,
    summary,
    verdict,
)

FOREIGN = re.compile(r"@|#\d|https?:|www\.|script|\\x1b|evil")
"""What only evidence says."""
OURS = {MARKER, "<details><summary>", "</details>"}


def tokens(text: str) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield from token.children or [token]


@pytest.mark.parametrize("name", VERDICTS)
def test_foreign_text_is_nothing_but_code(name: str) -> None:
    """GitHub links and mentions nothing in code."""
    for token in tokens(markdown(VERDICTS[name])):
        assert token.type not in ("link_open", "image", "em_open", "strong_open", "s_open")
        if token.type not in ("code_inline", "fence"):
            assert not FOREIGN.search(token.content), token
        if token.type.startswith("html"):
            assert any(token.content.startswith(ours) for ours in OURS), token


def test_the_test_sees_text_that_is_not_in_code() -> None:
    assert any(FOREIGN.search(token.content) and token.type == "text" for token in tokens("- by @here"))
    assert any(token.type.startswith("html") for token in tokens("- <script>"))


@pytest.mark.parametrize("name", VERDICTS)
def test_what_is_unfolded_is_folded_again(name: str) -> None:
    text = markdown(VERDICTS[name])
    inline = [token.content for token in tokens(text) if token.type == "html_block"]
    assert sum("<details>" in content for content in inline) == sum("</details>" in content for content in inline)


@pytest.mark.parametrize("text", [HOSTILE, "", "`", "``", " ", "a`", "`a", "a``b`c", "\n", "\\", "|", "<!--"])
def test_code_holds_any_text(text: str) -> None:
    for rendered in (f"- {code(text)} end", code_block(text, "sh")):
        found = [token for token in tokens(rendered) if token.type in ("code_inline", "fence")]
        assert len(found) == 1
    (inline, after) = [token for token in tokens(code(text) + " end") if token.type != "paragraph_open"][:2]
    assert (inline.type, after.content) == ("code_inline", " end")


@given(st.text(st.sampled_from("`~\\|<>!-&;[]()@#*_\n\t ab1\x00\u2028"), max_size=30))
@settings(max_examples=300, deadline=None)
def test_code_holds_what_is_drawn(text: str) -> None:
    for rendered in (f"- {code(text)}", f"| a |\n|---|\n\n{code_block(text, 'sh')}"):
        kinds = [token.type for token in tokens(rendered)]
        assert sum(kind in ("code_inline", "fence") for kind in kinds) == 1
        assert not {"html_inline", "html_block", "link_open", "em_open"} & set(kinds)


@pytest.mark.parametrize(
    ("judged", "line"),
    [
        (VERDICTS["open"], "## The gate is open: 2 cells"),
        (verdict([agreeing(key())]), "## The gate is open: 1 cell"),
        (
            VERDICTS["open, with an excused known failure"],
            "## The gate is open: 2 cells, 1 of them excused by known failures",
        ),
        (verdict([], of_gate(GateReason.STALE)), "## The gate is closed for 1 reason: stale (1)"),
        (
            verdict([blocked(key(), GateReason.WEAK), blocked(key("b"), GateReason.WEAK)], of_gate(GateReason.MIXED)),
            "## The gate is closed for 3 reasons: mixed (1), weak (2)",
        ),
    ],
)
def test_the_first_line_is_the_verdict_with_the_marker(judged: GateVerdict, line: str) -> None:
    assert markdown(judged).splitlines()[0] == f"{line} {MARKER}"


def test_the_table_counts_cells_by_verdict() -> None:
    judged = verdict(
        [
            agreeing(key("a")),
            excused(key("b")),
            blocked(key("c"), GateReason.MISSING),
            blocked(key("d"), GateReason.STALE),
        ]
    )
    assert markdown(judged).split("\n\n")[1].splitlines()[2:] == [
        "| AGREE | 2 | 0 | 1 |",
        "| DISAGREE | 1 | 1 | 0 |",
        "| MISSING | 1 | 0 | 1 |",
        "| all | 4 | 1 | 2 |",
    ]


def test_the_first_blockers_of_a_kind_are_shown_and_the_others_are_counted_and_folded() -> None:
    text = markdown(verdict(blocked(key(f"k{n:02}"), GateReason.STALE, f"Old {n}.") for n in range(11)))
    shown, _, folded = text.partition("<details><summary>All other reasons</summary>")
    assert shown.count("- `k") == 5
    assert "- and 6 more like these" in shown
    assert folded.count("- stale: `k") == 6


def test_a_disagreement_tells_its_problem_and_how_to_replay_it() -> None:
    text = markdown(verdict([blocked(key(), GateReason.DISAGREE)]))
    assert f"`{key()}` on `3 tokens in 1 sequence [3]`:\n\n- `loss: 1.01 times the reference`\n" in text
    assert "```sh\nlossgate replay failures/one.json\n```\n" in text


def test_a_failure_without_a_replay_command_has_no_block() -> None:
    judged = summary(key(), "DISAGREE", replay=None)
    cell = blocked(key(), GateReason.DISAGREE)
    assert "```" not in markdown(verdict([GatedCell(key=key(), summary=judged, blockers=cell.blockers)]))


def test_excused_known_failures_are_listed_with_their_issue() -> None:
    assert f"- `{key()}`: `{ISSUE}`" in markdown(verdict([excused(key())]))


def test_choices_that_were_not_distinguished_are_listed() -> None:
    cells = [GatedCell(key=key(name), summary=summary(key(name), not_distinguished=("mode a and b",))) for name in "xy"]
    assert "- `mode a and b: 2 cells of x and y`\n" in markdown(verdict(cells))


def test_properties_to_which_candidates_are_not_held_are_listed() -> None:
    cells = [GatedCell(key=key(name), summary=summary(key(name), properties=EXEMPT_RECORDS)) for name in "xy"]
    text = markdown(verdict(cells))
    assert "Not held to these properties, as the candidates declare:" in text
    assert "- `masked-nan: it multiplies: 2 cells of x and y`\n" in text


def test_problems_that_candidates_are_not_given_are_listed() -> None:
    narrow = {"ratios extreme": "they are clamped"}
    cells = [GatedCell(key=key(name), summary=summary(key(name), excluded=narrow)) for name in "xy"]
    text = markdown(verdict(cells))
    assert "Not verified, because the candidates leave out such problems:" in text
    assert "- `ratios extreme: they are clamped: 2 cells of x and y`\n" in text


def test_the_cell_that_comes_nearest_to_each_budget_is_listed() -> None:
    def with_use(layout: str, elements: float, waits: float) -> GatedCell:
        resources = {
            "largest_tensor": {"elements": elements, "forward": elements, "budget": 8192.0},
            "peak": {"bytes": 5.0},
            "host_waits": {"calls": waits, "budget": 0.0},
            "problem": {"tokens": 64.0},
        }
        cell = key("x", layout=layout)
        return GatedCell(key=cell, summary=summary(cell, resources=resources))

    text = markdown(verdict([with_use("single", 4096, 0), with_use("tp=2", 6000, 1), with_use("cp=2", 5000, 0)]))
    _, _, section = text.partition("the cell that comes nearest to each budget</summary>\n\n")
    assert section.splitlines()[:3] == [
        "- `x: largest tensor: 6,000 elements of a budget of 8,192, in agreement-tp=2-float32`",
        "- `x: host waits: 1 calls of a budget of 0, in agreement-tp=2-float32`",
        "",
    ]
    assert "nearest to each budget" not in markdown(verdict([GatedCell(key=key(), summary=summary(key()))]))


@pytest.mark.parametrize("limit", [2_000, 4_000, 10_000, 65_000])
def test_the_comment_is_not_longer_than_its_limit(limit: int) -> None:
    for judged in (
        many(3_000),
        hostile(),
        verdict(blocked(key(f"😀{n}"), GateReason.WEAK, "😀" * 400) for n in range(90)),
    ):
        text = markdown(judged, limit=limit)
        assert len(text.encode("utf-16-le")) // 2 <= limit
        assert text.startswith("## The gate is closed")


def test_a_cut_comment_says_how_many_items_it_leaves_out() -> None:
    judged = verdict(blocked(key(f"k{n:04}"), GateReason.WEAK) for n in range(1_000))
    text = markdown(judged)
    (left,) = re.findall(r"^- (\d+) more are left out here", text, re.MULTILINE)
    assert int(left) + text.count("- `k") + text.count("- weak: `k") == 1_000
    assert "This comment can't be longer" in text
    assert len(text) > 60_000


def test_a_comment_leaves_out_sections_that_have_no_items_or_no_room() -> None:
    comment = Comment(400)
    comment.must("head\n")
    comment.section("empty\n", [], "")
    comment.section("long\n", ["x" * 500], "")
    comment.section("short\n", ["item\n"], "end\n")
    assert comment.text().startswith("head\nshort\nitem\nend\n\nThis comment can't be longer")
