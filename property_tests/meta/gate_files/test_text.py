# SPDX-License-Identifier: Apache-2.0
"""Tests of the screen on which people read a gate's verdict."""

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from lossgate.engine.cell_record import CellKey
from lossgate.gate.gate_verdict import Blocker, Committed, GatedCell, GateReason, GateVerdict
from lossgate.reports.describe import EXCLUDED, EXEMPT, NOT_DISTINGUISHED
from lossgate.reports.gate_text import print_gate
from property_tests.meta.gate_files import verdicts
from property_tests.meta.gate_files.verdicts import HOSTILE, agreeing, blocked, key, summary, verdict

REPLAY = "  replay: lossgate replay failures/one.json"


def shown(of: GateVerdict, width: int = 180, *, terminal: bool = False) -> list[str]:
    text = StringIO()
    print_gate(of, Console(file=text, width=width, highlight=False, force_terminal=terminal, color_system=None))
    return text.getvalue().splitlines()


def reason(kind: GateReason, message: str = "it is wrong", cell: CellKey | None = None) -> Blocker:
    return Blocker(reason=kind, message=message, cell=cell)


def disagreeing(of: CellKey, message: str = "it disagrees: loss is 2 times the reference", **changed: Any) -> GatedCell:
    result = summary(of, "DISAGREE", **changed)
    return GatedCell(key=of, summary=result, blockers=(reason(GateReason.DISAGREE, message, of),))


def test_choices_that_were_not_distinguished_stand_last() -> None:
    alike = GatedCell(key=key(), summary=summary(key(), not_distinguished=("mode a and b",)))
    assert shown(verdict([alike]))[-3:] == ["", NOT_DISTINGUISHED, "  mode a and b: 1 cell of kernel"]


def test_properties_to_which_a_candidate_is_not_held_stand_last() -> None:
    exempt = GatedCell(key=key(), summary=summary(key(), properties=verdicts.EXEMPT))
    assert shown(verdict([exempt]))[-3:] == ["", EXEMPT, "  masked-nan: it multiplies: 1 cell of kernel"]


def test_problems_that_a_candidate_is_not_given_stand_last() -> None:
    narrow = GatedCell(key=key(), summary=summary(key(), excluded={"ratios extreme": "they are clamped"}))
    assert shown(verdict([narrow]))[-3:] == ["", EXCLUDED, "  ratios extreme: they are clamped: 1 cell of kernel"]


def test_an_open_gate_has_three_lines() -> None:
    assert shown(verdict([agreeing(key())]))[:2] == [
        "OPEN: the evidence is what the policy asks for",
        "  1 cell: 1 AGREE",
    ]


def test_changes_that_are_not_committed_are_named_beside_the_commit() -> None:
    files = "evidence in 1 file of commit 4f4f4f4f4f4f"
    said = {of: shown(verdict([agreeing(key())], commits=("4f" * 20,), committed=of))[2] for of in Committed}
    assert f"{files}, with changes that are not committed, torch" in said[Committed.NO]
    assert f"{files}, torch" in said[Committed.YES]
    assert said[Committed.UNKNOWN] == said[Committed.YES]


@pytest.mark.parametrize("kind", GateReason)
def test_the_heading_of_a_reason_is_its_word(kind: GateReason) -> None:
    """The word that documentation, JUnit, SARIF and the page use."""
    lines = shown(verdict([agreeing(key())], reason(kind), reason(kind)))
    assert lines[0] == "CLOSED: 2 reasons"
    assert lines[3:] == ["", f"{kind.value} (2)", "  it is wrong", "  it is wrong"]


def test_one_reason_is_singular() -> None:
    assert shown(verdict([], reason(GateReason.EMPTY)))[0] == "CLOSED: 1 reason"


def test_a_cell_is_named_once_for_each_kind_of_reason() -> None:
    one = key()
    both = (reason(GateReason.WEAK, "too few problems", one), reason(GateReason.WEAK, "too blind", one))
    cell = GatedCell(key=one, summary=summary(one), blockers=both)
    lines = shown(verdict([cell, blocked(key("other"), GateReason.WEAK, "too few problems")]))
    assert lines[0] == "CLOSED: 3 reasons"
    assert lines[4:] == [
        "weak (3)",
        f"  {one}: too few problems",
        "    also: too blind",
        f"  {key('other')}: too few problems",
    ]


def test_the_first_cells_of_a_kind_are_shown_and_the_other_reasons_counted() -> None:
    cells = [blocked(key(f"kernel_{i}"), GateReason.STALE) for i in range(5)]
    lines = shown(verdict(cells))
    assert [line.partition("[")[0] for line in lines[5:]] == [
        "  kernel_0",
        "  kernel_1",
        "  kernel_2",
        "  and 2 more like these",
    ]


def test_the_gravest_reasons_stand_first() -> None:
    lines = shown(
        verdict([], *map(reason, (GateReason.WEAK, GateReason.MISSING, GateReason.DISAGREE, GateReason.DAMAGED)))
    )
    headings = [line for line in lines if line.endswith("(1)")]
    assert headings == ["disagree (1)", "damaged (1)", "missing (1)", "weak (1)"]


@pytest.mark.parametrize("width", [40, 60, 100])
def test_the_replay_command_is_a_line_of_its_own_that_is_never_wrapped(width: int) -> None:
    lines = shown(verdict([disagreeing(key())]), width, terminal=True)
    assert lines[-1] == REPLAY


def test_only_disagreements_have_a_replay_command() -> None:
    one = key()
    result = summary(one, "DISAGREE")
    stale = GatedCell(key=one, summary=result, blockers=(reason(GateReason.STALE, cell=one),))
    assert REPLAY not in shown(verdict([stale]))
    assert not any("replay" in line for line in shown(verdict([disagreeing(one, replay=None)])))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_wrapped_lines_hang_on_a_terminal_and_stay_whole_in_a_file(width: int) -> None:
    message = "word " * 60 + "end"
    of = verdict([blocked(key(), GateReason.STALE, message)])
    assert f"  {key()}: {message}" in shown(of, width)
    lines = shown(of, width, terminal=True)
    first = next(number for number, line in enumerate(lines) if line.startswith(f"  {key()}"))
    rest = lines[first + 1 :]
    assert rest
    assert all(re.match(r" {6}\S", line) for line in rest)
    assert max(map(len, lines)) <= width


def test_text_of_files_is_shown_literally() -> None:
    one = key(HOSTILE)
    cell = disagreeing(one, HOSTILE, replay=f"lossgate replay {HOSTILE}")
    damaged = reason(GateReason.DAMAGED, "[red]loud[/]")
    of = verdict([cell], damaged, versions={HOSTILE: (HOSTILE,)}, commits=(HOSTILE,))
    text = "\n".join(shown(of))
    assert "[red]loud[/]" in text
    assert not re.search("[\x00\x1b\x85\u202e\u2028\udcff\ufffe]", text)
    assert len(text.splitlines()) == len(shown(verdict([disagreeing(one)], reason(GateReason.DAMAGED))))
