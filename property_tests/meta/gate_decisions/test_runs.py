# SPDX-License-Identifier: Apache-2.0
"""Tests of what the gate asks of runs: that they are whole, fresh, of one code, and all parts."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pytest

from lossgate.evidence.records import Matrix, Record
from lossgate.evidence.sealed import matrix_of
from lossgate.gate.gate_verdict import Committed, GateCode, GateReason
from property_tests.meta.gate_decisions.decided import CELLS, NOW, RULES, Gate, only, reported
from property_tests.meta.made_evidence import (
    COMMIT,
    cell,
    disagreeing,
    run,
    whole_run,
)


def without(number: int) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [record for i, record in enumerate(records) if i != number]


def replaced(number: int, **changes: Any) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [
        msgspec.structs.replace(record, **changes) if i == number else record for i, record in enumerate(records)
    ]


RUNS: dict[str, tuple[Callable[[list[Record]], list[Record]], GateReason, str]] = {
    "no start": (without(0), GateReason.DAMAGED, "run run-1: the record of its start is missing"),
    "no end": (without(3), GateReason.UNFINISHED, "run run-1: the record of its end is missing: it was stopped"),
    "a cell is gone": (without(2), GateReason.DAMAGED, "run run-1: its end counts 2 cells, but the evidence has 1"),
    "stopped": (replaced(3, stopped="a rank is lost"), GateReason.UNFINISHED, "it was stopped: a rank is lost"),
    "another cell": (
        replaced(2, seconds=2.0),
        GateReason.DAMAGED,
        "its end was written for other cells. Verify again, into a new file",
    ),
    "planned and not there": (
        replaced(0, cells=(*(c.key for c in CELLS), cell(layout="cp=2").key)),
        GateReason.MISSING,
        "run run-1 planned it, but has no result of it",
    ),
    "planned at the end": (
        replaced(3, planned=(cell(layout="cp=2").key,)),
        GateReason.MISSING,
        "run run-1 planned it",
    ),
    "there and not planned": (
        replaced(0, cells=(cell().key,)),
        GateReason.CONTRADICTORY,
        "run run-1 has a result of it, but did not plan it",
    ),
    "modified": (replaced(0, modified=True), GateReason.MIXED, "files differed from the commit"),
    "source": (
        replaced(1, source_modified=True),
        GateReason.MIXED,
        "kernels.py was not as in the commit, but the policy asks for unmodified = true",
    ),
    "unknown source": (replaced(1, source_modified=None), GateReason.MIXED, "kernels.py was not as in the commit"),
    "no checkout": (
        replaced(0, modified=None),
        GateReason.MIXED,
        "it is not known whether files differed from the commit",
    ),
    "no commit": (replaced(0, commit=None), GateReason.MIXED, "evidence names no commit"),
    "no version": (replaced(0, versions={"lossgate": "1"}), GateReason.MIXED, "several versions of torch: unknown"),
    "first day of the calendar": (
        replaced(1, time="0001-01-01T00:00:00+00:00"),
        GateReason.STALE,
        "it is from 0001-01-01T00:00+00:00",
    ),
    "no time": (
        replaced(1, time="2026-13-01T00:00:00+00:00"),
        GateReason.DAMAGED,
        "'2026-13-01T00:00:00+00:00' is not a time",
    ),
    "another source": (
        replaced(1, source_digest="f" * 64),
        GateReason.MIXED,
        "kernels.py was changed while its candidates were verified",
    ),
}


@pytest.mark.parametrize("wrong", RUNS)
def test_a_run_that_is_not_as_it_should_be_closes_the_gate(gate: Gate, wrong: str) -> None:
    change, kind, message = RUNS[wrong]
    verdict = gate.decide(change(whole_run(CELLS)))
    assert any(what is kind and message in text for what, text in reported(verdict)), reported(verdict)
    assert verdict.code is GateCode.CLOSED


def test_a_cell_that_was_not_tried_since_others_fail_alike_is_told_so(gate: Gate) -> None:
    cells = [disagreeing(), disagreeing(layout="dp=2")]
    planned = (*(one.key for one in cells), cell(layout="cp=2").key)
    verdict = gate.decide(replaced(0, cells=planned)(whole_run(cells)))
    message = "has no result of it, probably as all others of the candidate disagree: mend them first"
    assert any(message in text for what, text in reported(verdict) if what is GateReason.MISSING), reported(verdict)


def test_two_starts_of_one_run_close_the_gate(gate: Gate) -> None:
    kind, message = only(gate.decide([*whole_run(CELLS), run(CELLS, host="other")]))
    assert kind is GateReason.CONTRADICTORY
    assert "another line has started or ended this run differently" in message


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            NOW.replace(day=22),
            "but the policy allows evidence of at most 1 day. Verify again",
        ),
        (NOW.replace(day=19), "which is later than now, 2026-11-19T18:00+00:00; set the clocks right"),
    ],
)
def test_evidence_of_another_time_closes_the_gate(gate: Gate, now: datetime, message: str) -> None:
    kind, text = only(gate.decide(whole_run(CELLS), now=now))
    assert kind is GateReason.STALE
    assert text.startswith(f"run run-1: it is from 2026-11-20T12:00+00:00, {message}")


def test_without_a_greatest_age_evidence_may_be_old(gate: Gate) -> None:
    rules = RULES.replace('max_age = "1 day"', "")
    assert gate.decide(whole_run(CELLS), rules=rules, now=NOW.replace(year=2036)).passes


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "commit": ({"commit": "d" * 40}, "evidence is of several commits: commit " + "c" * 40 + ", commit " + "d" * 40),
    "lossgate": (
        {"versions": {"lossgate": "0.2.0", "torch": "2.13.0"}},
        "evidence is of several versions of lossgate: 0.1.0, 0.2.0",
    ),
    "torch": (
        {"versions": {"lossgate": "0.1.0", "torch": "2.14.0"}},
        "evidence is of several versions of torch: 2.13.0, 2.14.0",
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_evidence_of_different_code_closes_the_gate(gate: Gate, what: str) -> None:
    changes, message = OTHER[what]
    kind, text = only(gate.decide(whole_run(CELLS[:1]), whole_run(CELLS[1:], run="run-2", **changes)))
    assert kind is GateReason.MIXED
    assert text.startswith(message)
    rules = RULES.replace("[evidence]", "[evidence]\nsame_commit = false\nsame_versions = []")
    assert gate.decide(whole_run(CELLS[:1]), whole_run(CELLS[1:], run="run-2", **changes), rules=rules).passes


def test_the_commit_of_the_release_is_asked_for(gate: Gate) -> None:
    assert gate.decide(whole_run(CELLS), commit=COMMIT).passes
    kind, text = only(gate.decide(whole_run(CELLS), commit="e" * 40))
    assert kind is GateReason.MIXED
    assert text == f"run run-1: it is of commit {COMMIT}, but commit {'e' * 40} is asked for"


def parts(of: int, *numbers: int) -> list[list[Record]]:
    """Returns the runs of some parts of a matrix that has the cells of ``CELLS``."""
    matrix = matrix_of(one.key for one in CELLS)
    return [
        whole_run([CELLS[n % 2]], run=f"run-{n}", part=f"{n}/{of}", matrix=matrix) if n <= 2 else [] for n in numbers
    ]


def test_all_parts_of_a_matrix_open_the_gate(gate: Gate) -> None:
    assert gate.decide(*parts(2, 1, 2)).passes


def test_a_missing_part_closes_the_gate(gate: Gate) -> None:
    only_one_is_required = RULES.replace('["single", "tp=2"]', '["*"]')
    kind, message = only(gate.decide(*parts(2, 2), rules=only_one_is_required))
    assert kind is GateReason.MISSING
    assert message == "part 1/2 of the matrix of 2 cells is missing; verify with --shard, or add the file"


WRONG_PARTS: dict[str, tuple[dict[str, Any], GateReason, str]] = {
    "no matrix": ({"matrix": None}, GateReason.DAMAGED, "it is part 1/2, but does not say of which matrix"),
    "another matrix": (
        {"matrix": Matrix(cells=8, digest="b" * 64)},
        GateReason.MISSING,
        "part 2/2 of the matrix of 8 cells is missing",
    ),
    "no part": ({"part": None}, GateReason.DAMAGED, "it planned other cells than its matrix of 2 cells has"),
}


@pytest.mark.parametrize("wrong", WRONG_PARTS)
def test_a_part_that_does_not_fit_its_matrix_closes_the_gate(gate: Gate, wrong: str) -> None:
    changes, kind, message = WRONG_PARTS[wrong]
    (first, *others), second = parts(2, 1, 2)
    verdict = gate.decide([msgspec.structs.replace(first, **changes), *others], second)
    assert any(what is kind and message in text for what, text in reported(verdict)), reported(verdict)


@pytest.mark.parametrize("part", ["x/y", "1", "0/2", "1/" + "9" * 5000, "²/3"])
def test_a_part_that_cannot_be_read_is_damage(gate: Gate, part: str) -> None:
    (first, *others), second = parts(2, 1, 2)
    verdict = gate.decide([msgspec.structs.replace(first, part=part), *others], second)
    assert any(what is GateReason.DAMAGED and "matching regex" in text for what, text in reported(verdict))


def test_parts_that_share_out_other_cells_close_the_gate(gate: Gate) -> None:
    matrix = matrix_of([*(one.key for one in CELLS), cell(layout="cp=2").key])
    both = [whole_run(CELLS, run=f"run-{n}", part=f"{n}/2", matrix=matrix) for n in (1, 2)]
    kind, message = only(gate.decide(*both))
    assert kind is GateReason.DAMAGED
    assert message == (
        "all parts of the matrix of 3 cells are there, but together they planned other cells than the matrix has. "
        "Verify again, with the same settings for all parts"
    )


def test_the_whole_matrix_needs_no_parts(gate: Gate) -> None:
    whole = whole_run(CELLS, run="whole", matrix=matrix_of(one.key for one in CELLS))
    assert gate.decide(whole, *parts(2, 1)).passes


@pytest.mark.parametrize(
    "records", [whole_run(CELLS, modified=True), whole_run([cell(source_modified=True), cell(layout="tp=2")])]
)
def test_an_open_gate_says_that_files_were_not_committed(gate: Gate, records: list[Record]) -> None:
    rules = RULES.replace("unmodified = true", "unmodified = false")
    assert gate.decide(whole_run(CELLS), rules=rules).committed is Committed.YES
    verdict = gate.decide(records, rules=rules, commit=COMMIT)
    assert (verdict.passes, verdict.committed) == (True, Committed.NO)
