# SPDX-License-Identifier: Apache-2.0
"""Tests of what the page shows before a cell is opened: states, headline, matrix."""

import pytest
from msgspec.structs import replace

from lossgate.engine.cell_record import CellRecord
from lossgate.gate.gate_verdict import GatedCell, GateReason
from lossgate.reports.page.entries import Page, State, count_states, entries_of, matrix_of
from lossgate.reports.page.headline import detects, headline, origin_of, problems_of
from property_tests.meta.made_evidence import breaking
from property_tests.meta.page.made import DIGEST, RUN, blocker, gate, gated, key, known, page, record

WRONG = record("wrong", verdict="DISAGREE", reasons=("loss: 1.01 times the reference",))
UNSURE = record("unsure", verdict="INCONCLUSIVE", mde=None)
DAY = "2026-01-31"
BREAKING = breaking("masked-nan", "no-grad", candidate="breaking")
EXPECTED = record("expected", verdict="DISAGREE", known_failure=known(expected=True))


@pytest.mark.parametrize(
    ("cell", "state"),
    [
        (record(), State.AGREES),
        (WRONG, State.DISAGREES),
        (BREAKING, State.BROKEN),
        (UNSURE, State.INCONCLUSIVE),
        (EXPECTED, State.KNOWN),
        (record(verdict="DISAGREE", known_failure=known(expected=False)), State.DISAGREES),
    ],
)
def test_the_state_of_a_record(cell: CellRecord, state: State) -> None:
    (entry,) = entries_of(page(cell))
    assert entry.state is state


@pytest.mark.parametrize(
    ("cell", "state"),
    [
        (gated(record()), State.AGREES),
        (gated("gone", blocker(GateReason.MISSING, "gone")), State.MISSING),
        (gated(WRONG, blocker(GateReason.DISAGREE, "wrong")), State.DISAGREES),
        (gated(WRONG, excused="https://example.org/7"), State.KNOWN),
    ],
)
def test_the_state_of_a_cell_that_a_gate_knows(cell: GatedCell, state: State) -> None:
    (entry,) = entries_of(page(gate=gate(cell)))
    assert entry.state is state


def test_a_page_shows_cells_of_the_gate_and_of_evidence_once_each_by_key() -> None:
    entries = entries_of(page(record("b"), record("a"), gate=gate(gated(record("b")), gated("c"))))
    assert [entry.key.candidate for entry in entries] == ["a", "b", "c"]
    assert [entry.record is None for entry in entries] == [False, False, True]


@pytest.mark.parametrize(
    ("mde", "text"),
    [(3.879e-7, "3.9e-7"), (1e-4, "0.01%"), (0.00131, "0.13%"), (0.01, "1%"), (1.0, "100%"), (1.5, "nothing")],
)
def test_the_detectable_effect_is_written_as_the_terminal_does(mde: float, text: str) -> None:
    (entry,) = entries_of(page(record(mde=mde)))
    assert detects(entry) == text


def test_what_is_detected_by_a_cell_without_power_or_without_evidence() -> None:
    assert [detects(entry) for entry in entries_of(page(UNSURE, gate=gate(gated("gone"))))] == ["missing", "nothing"]


@pytest.mark.parametrize(
    "cell",
    [
        record(verdict="DISAGREE", mde=None),
        record(verdict="DISAGREE", mde=1.5),
        record(verdict="DISAGREE", mde=None, known_failure=known(expected=True)),
        record(verdict="INCONCLUSIVE", mde=None, comparisons=0),
    ],
)
def test_no_effect_is_known_of_a_cell_that_disagrees_or_was_never_compared(cell: CellRecord) -> None:
    assert [detects(entry) for entry in entries_of(page(cell))] == ["\N{EN DASH}"]


@pytest.mark.parametrize(
    ("good", "shown", "verdict", "why"),
    [
        (False, page(), "There are no cells.", "The evidence has no results."),
        (True, page(record()), "The one cell agrees.", ""),
        (True, page(record("a"), record("b")), "All 2 cells agree.", ""),
        (True, page(record("a"), EXPECTED), "No cell disagrees.", "Only known failures do."),
        (False, page(record("a"), WRONG), "1 of 2 cells disagrees.", ""),
        (
            False,
            page(record("a"), BREAKING),
            "1 of 2 cells breaks promises.",
            "Numbers agree, 2 promises broken: masked-nan, no-grad.",
        ),
        (False, page(BREAKING, WRONG), "1 of 2 cells disagrees.", "1 of 2 cells breaks promises."),
        (
            False,
            page(gate=gate(gated(BREAKING, blocker(GateReason.PROMISE_BROKEN, "breaking")))),
            "The gate is closed.",
            "Exit code 1: 1 cell breaks promises.",
        ),
        (
            False,
            page(
                gate=gate(
                    gated(BREAKING, blocker(GateReason.PROMISE_BROKEN, "breaking")),
                    gated(WRONG, blocker(GateReason.DISAGREE, "wrong")),
                )
            ),
            "The gate is closed.",
            "Exit code 1: 1 cell disagrees and 1 cell breaks promises.",
        ),
        (False, page(UNSURE), "1 of 1 cell is inconclusive.", "Nothing wrong was seen, but not enough was seen."),
        (
            True,
            page(gate=gate(gated(record("a")), gated(record("b")))),
            "The gate is open.",
            "Exit code 0: all 2 required cells pass.",
        ),
        (
            False,
            page(gate=gate(gated(WRONG, blocker(GateReason.DISAGREE, "wrong")))),
            "The gate is closed.",
            "Exit code 1: 1 cell disagrees.",
        ),
        (
            False,
            page(
                gate=gate(
                    gated(WRONG, blocker(GateReason.DISAGREE, "wrong")),
                    gated("gone", blocker(GateReason.MISSING, "gone")),
                    others=[blocker(GateReason.STALE), blocker(GateReason.STALE, message="Again.")],
                )
            ),
            "The gate is closed.",
            "Exit code 1: 1 cell disagrees, and there are 3 other reasons: 1 missing, 2 stale.",
        ),
        (
            False,
            page(gate=gate(gated(WRONG, blocker(GateReason.DISAGREE, "wrong")), others=[blocker(GateReason.MIXED)])),
            "The gate is closed.",
            "Exit code 1: 1 cell disagrees, and there is 1 other reason: 1 mixed.",
        ),
        (
            False,
            page(gate=gate(gated("gone", blocker(GateReason.MISSING, "gone")))),
            "The gate is closed.",
            "Exit code 3: no cell disagrees, but the evidence is not enough: 1 missing.",
        ),
    ],
)
def test_the_headline(good: bool, shown: Page, verdict: str, why: str) -> None:
    said = headline(shown.gate, entries_of(shown))
    assert (said.verdict, said.why) == (verdict, why)
    assert said.good == good


def test_what_keeps_a_gate_closed_names_the_cell_that_opens() -> None:
    verdict = gate(
        gated("gone", blocker(GateReason.MISSING, "gone")), others=[blocker(GateReason.MIXED, message="Two commits.")]
    )
    problems = problems_of(verdict, entries_of(page(record("a"), gate=verdict)))
    assert [(p.kind, p.message, p.where, p.cell) for p in problems] == [
        ("mixed", "Two commits.", "a.jsonl:3", None),
        ("missing", "Mend it.", "a.jsonl:3", 1),
    ]


def test_a_report_lists_what_does_not_agree_but_for_known_failures() -> None:
    shown = page(record("a"), EXPECTED, UNSURE, WRONG)
    found = [(problem.kind, problem.message) for problem in problems_of(None, entries_of(shown))]
    assert found == [("inconclusive", ""), ("disagrees", "loss: 1.01 times the reference")]


def test_states_are_counted_the_worst_first() -> None:
    assert count_states(entries_of(page(record("a"), record("b"), WRONG))) == [(State.DISAGREES, 1), (State.AGREES, 2)]


def test_the_matrix_has_layouts_by_size_and_a_row_for_what_else_differs() -> None:
    cells = [
        record("a", layout="dp=2,cp=2"),
        record("a", layout="single"),
        record("a", layout="dp=2"),
        record("a", layout="dp=2", dtype="bfloat16"),
        record("a", layout="dp=2", world="gloo", device="cuda"),
        record("b", spec="dpo"),
    ]
    entries = entries_of(page(*cells))
    matrix = matrix_of(entries)
    assert matrix.layouts == ["single", "dp=2", "dp=2,cp=2"]
    abouts = {group.candidate: group.about for group in matrix.groups}
    assert abouts == {"a": "nll from hidden", "b": "dpo from hidden"}
    shown = [
        (row.dtype, row.where, [None if i is None else entries[i].key.layout for i in row.cells])
        for row in matrix.groups[0].rows
    ]
    assert shown == [
        ("bfloat16", "", [None, "dp=2", None]),
        ("float32", "", ["single", "dp=2", "dp=2,cp=2"]),
        ("float32", "gloo/cuda", [None, "dp=2", None]),
    ]


def test_every_cell_is_in_the_matrix_once() -> None:
    cells = [record(f"c{i % 3}", layout=f"dp={i}") for i in range(1, 12)]
    entries = entries_of(page(*cells, gate=gate(gated("gone"))))
    numbers = [i for group in matrix_of(entries).groups for row in group.rows for i in row.cells if i is not None]
    assert sorted(numbers) == list(range(len(entries)))
    assert entries[-1].key == key("gone")


OLDER = replace(RUN, run="older", commit="00" * 20, versions={"torch": "1.0"})
VERSIONS = [("lossgate", "0.1.0"), ("torch", "2.13.0")]


@pytest.mark.parametrize(
    ("shown", "facts"),
    [
        (page(), []),
        (
            page(record(), record("b", time="2026-02-01T00:00:00+00:00"), runs=[RUN, OLDER]),
            [
                ("commit", f"{'4f' * 6}, with files that differ from it"),
                *VERSIONS,
                ("evidence of", "2026-01-31 to 2026-02-01"),
            ],
        ),
        (page(record(), runs=[replace(RUN, commit=None, versions={})]), [("commit", "unknown"), ("evidence of", DAY)]),
        (
            page(gate=gate(gated(record()))),
            [
                ("commit", "4f" * 6),
                ("policy", f"gate.toml {DIGEST[:12]}"),
                ("lossgate", "0.1.0"),
                ("evidence of", DAY),
            ],
        ),
    ],
)
def test_the_line_of_commit_policy_versions_and_date(shown: Page, facts: list[tuple[str, str]]) -> None:
    """Runs of history do not count."""
    assert [tuple(fact) for fact in origin_of(shown, entries_of(shown))] == facts


def test_a_line_of_many_commits_stays_short() -> None:
    runs = [replace(RUN, run=str(i), commit=f"{i}" * 40, modified=False) for i in range(1, 6)]
    cells = [record(str(i), run=str(i)) for i in range(1, 6)]
    facts = dict(origin_of(shown := page(*cells, runs=runs), entries_of(shown)))
    assert facts["commits"] == f"{'1' * 12}, {'2' * 12}, {'3' * 12} and 2 more"
