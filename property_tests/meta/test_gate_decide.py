# SPDX-License-Identifier: Apache-2.0
"""Tests of the gate's decision: what it lets through, and each thing that closes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lossgate.evidence.gather import gather
from lossgate.evidence.records import CellRecord, KnownFailureRecord, Matrix, OutputRecord, PooledRecord, Record
from lossgate.evidence.sealed import matrix_of
from lossgate.gate.decide import decide
from lossgate.gate.policy import load_policy
from lossgate.gate.verdict import GateCode, GateVerdict, Kind
from property_tests.meta.made_evidence import (
    COMMIT,
    cell,
    disagreeing,
    inconclusive,
    output,
    run,
    whole_run,
    write,
)

NOW = datetime(2026, 11, 20, 18, tzinfo=UTC)
"""Six hours after the runs of ``made_evidence``."""

RULES = """
schema = 1

[evidence]
max_age = "1 day"
unmodified = true

[[require]]
candidates = ["nll"]
layouts = ["single", "tp=2"]
dtypes = ["float32"]
min_problems = 3
"""

KNOWN = """
[[known_failure]]
candidate = "nll"
layout = "tp=2"
dtype = "float32"
name = "nll-1"
example = "frozen.json"
issue = "https://example.com/issues/1"
owner = "somebody"
expires = 2026-12-01
"""

FROZEN = b'{"examples": [{"symptoms": ["loss", "grad of hidden"]}]}'
CELLS = (cell(), cell(layout="tp=2"))
SECOND = 1
TWO = output(
    cases=(0, 1),
    scale=(0.0, 0.0),
    limit=(1e-6, 1e-6),
    sd=(1e-7, 1e-7),
    mean=(0.0, 0.0),
    shares={},
    pooled=PooledRecord(problems=2, scale=0.0, limit=5.9325e-06),
)
"""The loss of a cell with two problems."""


@dataclass(frozen=True)
class Gate:
    """A folder with a policy and evidence."""

    folder: Path

    def decide(
        self, *files: Sequence[Record], rules: str = RULES, now: datetime = NOW, commit: str | None = None
    ) -> GateVerdict:
        """Decides about files, each with some records."""
        (self.folder / "gate.toml").write_text(rules)
        (self.folder / "frozen.json").write_bytes(FROZEN)
        paths = [write(self.folder / f"{number}.jsonl", records) for number, records in enumerate(files)]
        return decide(gather(paths), load_policy(self.folder / "gate.toml"), now, commit)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def told(verdict: GateVerdict) -> list[tuple[Kind, str]]:
    return [(blocker.kind, blocker.message) for blocker in verdict.blockers]


def only(verdict: GateVerdict) -> tuple[Kind, str]:
    """Returns the one thing that keeps a gate closed."""
    (found,) = told(verdict)
    return found


def test_good_evidence_opens_the_gate(gate: Gate) -> None:
    verdict = gate.decide(whole_run(CELLS))
    assert told(verdict) == []
    assert (verdict.passes, verdict.code) == (True, GateCode.OPEN)
    assert [(str(c.key), c.verdict, c.required) for c in verdict.cells] == [
        ("nll[agreement-single-float32]", "AGREE", True),
        ("nll[agreement-tp=2-float32]", "AGREE", True),
    ]
    assert verdict.commits == (COMMIT,)
    assert [source.file for source in verdict.sources] == ["kernels.py"]
    assert verdict.policy.sha256 == sha256(RULES.encode()).hexdigest()


def test_the_same_files_give_the_same_verdict(gate: Gate) -> None:
    assert gate.decide(whole_run(CELLS)) == gate.decide(whole_run(CELLS))


def test_the_order_of_lines_and_files_does_not_matter(gate: Gate) -> None:
    first, *cells, last = whole_run(CELLS)
    assert gate.decide([last, *cells[::-1]], [first]).passes


# Cells

ONE_WRONG: dict[str, tuple[CellRecord | None, GateCode, Kind, str]] = {
    "it disagrees": (
        disagreeing(layout="tp=2"),
        GateCode.DISAGREE,
        Kind.DISAGREE,
        "it disagrees: loss: 1.01 times the reference",
    ),
    "it is inconclusive": (
        inconclusive(layout="tp=2"),
        GateCode.CLOSED,
        Kind.INCONCLUSIVE,
        "a kernel that computes label_smoothing=0.1 as 0 would have passed every problem",
    ),
    "few problems": (
        cell(layout="tp=2", problems=2, comparisons=2, coverage={"trained token": 2}, outputs=(TWO,)),
        GateCode.CLOSED,
        Kind.WEAK,
        "it has 2 problems, and the policy asks for 3; raise --examples",
    ),
    "it is missing": (
        None,
        GateCode.CLOSED,
        Kind.MISSING,
        "nll: no cell with layout tp=2, dtype float32",
    ),
    "its verdict is flipped": (
        disagreeing(layout="tp=2", verdict="AGREE"),
        GateCode.CLOSED,
        Kind.CONTRADICTORY,
        "the line contradicts its own numbers: its verdict is AGREE, and its numbers give DISAGREE. Verify again",
    ),
    "a number is changed": (
        cell(layout="tp=2", outputs=(output(scale=(1e-8, 3e-7, 0.5e-8)),)),
        GateCode.CLOSED,
        Kind.CONTRADICTORY,
        "loss has a pooled scale of",
    ),
}


@pytest.mark.parametrize("wrong", ONE_WRONG)
def test_one_cell_that_is_wrong_closes_the_gate(gate: Gate, wrong: str) -> None:
    record, code, kind, message = ONE_WRONG[wrong]
    verdict = gate.decide(whole_run([cell(), *([record] if record else [])]))
    found = told(verdict)
    assert kind in {what for what, _ in found}
    assert any(message in text for _, text in found), found
    assert verdict.code is code
    assert not verdict.passes


def test_an_error_that_could_have_stayed_hidden_closes_the_gate(gate: Gate) -> None:
    rules = RULES.replace("min_problems = 3", "min_problems = 3\nmax_mde = 1e-6")
    kinds = [what for what, _ in told(gate.decide(whole_run(CELLS), rules=rules))]
    assert kinds == [Kind.WEAK, Kind.WEAK]


def test_the_strictest_of_several_rules_counts(gate: Gate) -> None:
    more = '[[require]]\ncandidates = ["*"]\nmin_problems = 100\n'
    assert [what for what, _ in told(gate.decide(whole_run(CELLS), rules=RULES + more))] == [Kind.WEAK] * 2


def test_cells_that_no_rule_asks_for_do_not_have_to_be_conclusive(gate: Gate) -> None:
    verdict = gate.decide(whole_run([*CELLS, inconclusive(candidate="other")]))
    assert verdict.passes
    assert [c.required for c in verdict.cells] == [True, True, False]


def test_a_cell_that_disagrees_closes_the_gate_though_no_rule_asks_for_it(gate: Gate) -> None:
    verdict = gate.decide(whole_run([*CELLS, disagreeing(candidate="other")]))
    assert only(verdict)[0] is Kind.DISAGREE


def test_nothing_is_no_evidence(gate: Gate) -> None:
    kinds = {what for what, _ in told(gate.decide([]))}
    assert kinds == {Kind.EMPTY, Kind.MISSING}
    assert gate.decide([]).code is GateCode.CLOSED


# Several lines for one cell


def test_exact_copies_of_evidence_count_once(gate: Gate) -> None:
    assert gate.decide(whole_run(CELLS), whole_run(CELLS)).passes


def test_two_runs_with_the_same_numbers_agree(gate: Gate) -> None:
    later = [msgspec.structs.replace(one, seconds=9.0, time="2026-11-20T13:00:00+00:00") for one in CELLS]
    assert gate.decide(whole_run(CELLS), whole_run(later, run="run-2")).passes


def test_two_runs_with_other_numbers_close_the_gate(gate: Gate) -> None:
    other = output(shares={"noise": (0.25, 0.4, 0.125)})
    later = [cell(time="2026-11-20T13:00:00+00:00", outputs=(other,))]
    kind, message = only(gate.decide(whole_run(CELLS), whole_run(later, run="run-2")))
    assert kind is Kind.CONTRADICTORY
    assert message.endswith("0.jsonl:2 has another result of it: a number differs. Verify again, into a new file")


def test_another_verdict_of_the_same_cell_closes_the_gate(gate: Gate) -> None:
    kinds = {what for what, _ in told(gate.decide(whole_run(CELLS), whole_run([inconclusive()], run="run-2")))}
    assert Kind.CONTRADICTORY in kinds


def test_every_result_of_a_cell_counts(gate: Gate) -> None:
    """A newer result does not hide an older one."""
    older = [disagreeing(time="2026-11-20T12:00:10+00:00", candidate="other")]
    verdict = gate.decide(
        whole_run(CELLS), whole_run(older, run="run-2"), whole_run([cell(candidate="other")], run="run-3")
    )
    assert {what for what, _ in told(verdict)} == {Kind.CONTRADICTORY, Kind.DISAGREE}
    assert verdict.code is GateCode.DISAGREE


def test_a_line_that_contradicts_itself_is_no_disagreement(gate: Gate) -> None:
    verdict = gate.decide(whole_run([cell(), cell(layout="tp=2", verdict="DISAGREE", reasons=("none",))]))
    assert only(verdict)[0] is Kind.CONTRADICTORY


# Runs


def without(number: int) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [record for i, record in enumerate(records) if i != number]


def replaced(number: int, **changes: Any) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [
        msgspec.structs.replace(record, **changes) if i == number else record for i, record in enumerate(records)
    ]


RUNS: dict[str, tuple[Callable[[list[Record]], list[Record]], Kind, str]] = {
    "no start": (without(0), Kind.DAMAGED, "run run-1: the record of its start is missing"),
    "no end": (without(3), Kind.UNFINISHED, "run run-1: the record of its end is missing: it was stopped"),
    "a cell is gone": (without(2), Kind.DAMAGED, "run run-1: its end counts 2 cells, and the evidence has 1"),
    "stopped": (replaced(3, stopped="a rank is lost"), Kind.UNFINISHED, "it was stopped: a rank is lost"),
    "another cell": (replaced(2, seconds=2.0), Kind.DAMAGED, "its cells are not those that its end was written for"),
    "planned and not there": (
        replaced(0, cells=(*(c.key for c in CELLS), cell(layout="cp=2").key)),
        Kind.MISSING,
        "run run-1 planned it, and has no result of it",
    ),
    "planned at the end": (
        replaced(3, planned=(cell(layout="cp=2").key,)),
        Kind.MISSING,
        "run run-1 planned it",
    ),
    "there and not planned": (
        replaced(0, cells=(cell().key,)),
        Kind.CONTRADICTORY,
        "run run-1 has a result of it, and did not plan it",
    ),
    "modified": (replaced(0, modified=True), Kind.MIXED, "files differed from the commit"),
    "source": (
        replaced(1, source_modified=True),
        Kind.MIXED,
        "kernels.py was not as in the commit, and the policy asks for unmodified = true",
    ),
    "unknown source": (replaced(1, source_modified=None), Kind.MIXED, "kernels.py was not as in the commit"),
    "no checkout": (
        replaced(0, modified=None),
        Kind.MIXED,
        "it is not known whether files differed from the commit",
    ),
    "no commit": (replaced(0, commit=None), Kind.MIXED, "evidence names no commit"),
    "no version": (replaced(0, versions={"lossgate": "1"}), Kind.MIXED, "several versions of torch: unknown"),
    "first day of the calendar": (
        replaced(1, time="0001-01-01T00:00:00+00:00"),
        Kind.STALE,
        "it is from 0001-01-01T00:00+00:00",
    ),
    "no time": (
        replaced(1, time="2026-13-01T00:00:00+00:00"),
        Kind.DAMAGED,
        "'2026-13-01T00:00:00+00:00' is not a time",
    ),
    "another source": (replaced(1, source_digest="f" * 64), Kind.MIXED, "kernels.py was changed between the cells"),
}


@pytest.mark.parametrize("wrong", RUNS)
def test_a_run_that_is_not_as_it_should_be_closes_the_gate(gate: Gate, wrong: str) -> None:
    change, kind, message = RUNS[wrong]
    verdict = gate.decide(change(whole_run(CELLS)))
    assert any(what is kind and message in text for what, text in told(verdict)), told(verdict)
    assert verdict.code is GateCode.CLOSED


def test_two_starts_of_one_run_close_the_gate(gate: Gate) -> None:
    kind, message = only(gate.decide([*whole_run(CELLS), run(CELLS, host="other")]))
    assert kind is Kind.CONTRADICTORY
    assert "another line has started or ended this run differently" in message


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            NOW.replace(day=22),
            "and the policy allows evidence of at most 1 day. Verify again",
        ),
        (NOW.replace(day=19), "which is later than now, 2026-11-19T18:00+00:00; set the clocks right"),
    ],
)
def test_evidence_of_another_time_closes_the_gate(gate: Gate, now: datetime, message: str) -> None:
    kind, text = only(gate.decide(whole_run(CELLS), now=now))
    assert kind is Kind.STALE
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
    assert kind is Kind.MIXED
    assert text.startswith(message)
    rules = RULES.replace("[evidence]", "[evidence]\nsame_commit = false\nsame_versions = []")
    assert gate.decide(whole_run(CELLS[:1]), whole_run(CELLS[1:], run="run-2", **changes), rules=rules).passes


def test_the_commit_of_the_release_is_asked_for(gate: Gate) -> None:
    assert gate.decide(whole_run(CELLS), commit=COMMIT).passes
    kind, text = only(gate.decide(whole_run(CELLS), commit="e" * 40))
    assert kind is Kind.MIXED
    assert text == f"run run-1: it is of commit {COMMIT}, and commit {'e' * 40} is asked for"


# Parts of a matrix


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
    assert kind is Kind.MISSING
    assert message == "part 1/2 of the matrix of 2 cells is missing; verify with --shard, or add the file"


WRONG_PARTS: dict[str, tuple[dict[str, Any], Kind, str]] = {
    "no matrix": ({"matrix": None}, Kind.DAMAGED, "it is part 1/2, and does not say of which matrix"),
    "another matrix": (
        {"matrix": Matrix(cells=8, digest="b" * 64)},
        Kind.MISSING,
        "part 2/2 of the matrix of 8 cells is missing",
    ),
    "no part": ({"part": None}, Kind.DAMAGED, "it planned other cells than its matrix of 2 cells has"),
}


@pytest.mark.parametrize("wrong", WRONG_PARTS)
def test_a_part_that_does_not_fit_its_matrix_closes_the_gate(gate: Gate, wrong: str) -> None:
    changes, kind, message = WRONG_PARTS[wrong]
    (first, *others), second = parts(2, 1, 2)
    verdict = gate.decide([msgspec.structs.replace(first, **changes), *others], second)
    assert any(what is kind and message in text for what, text in told(verdict)), told(verdict)


@pytest.mark.parametrize("part", ["x/y", "1", "0/2", "1/" + "9" * 5000, "²/3"])
def test_a_part_that_cannot_be_read_is_damage(gate: Gate, part: str) -> None:
    (first, *others), second = parts(2, 1, 2)
    verdict = gate.decide([msgspec.structs.replace(first, part=part), *others], second)
    assert any(what is Kind.DAMAGED and "matching regex" in text for what, text in told(verdict))


def test_parts_that_share_out_other_cells_close_the_gate(gate: Gate) -> None:
    matrix = matrix_of([*(one.key for one in CELLS), cell(layout="cp=2").key])
    both = [whole_run(CELLS, run=f"run-{n}", part=f"{n}/2", matrix=matrix) for n in (1, 2)]
    kind, message = only(gate.decide(*both))
    assert kind is Kind.DAMAGED
    assert message == "all parts of the matrix of 3 cells are there, and they planned other cells"


def test_the_whole_matrix_needs_no_parts(gate: Gate) -> None:
    whole = whole_run(CELLS, run="whole", matrix=matrix_of(one.key for one in CELLS))
    assert gate.decide(whole, *parts(2, 1)).passes


# Known failures

FROZEN_DIGEST = sha256(FROZEN).hexdigest()


def declared(**changes: Any) -> CellRecord:
    """Returns the record of a cell whose candidate declares the known failure."""
    known = KnownFailureRecord(name="nll-1", example=FROZEN_DIGEST, expected=True)
    record = disagreeing(layout="tp=2", needs_adequacy=False, coverage={}, required=())
    return msgspec.structs.replace(
        record, **{"known_failure": msgspec.structs.replace(known, **changes.pop("known", {}))} | changes
    )


def test_a_known_failure_is_excused(gate: Gate) -> None:
    for record in (declared(), disagreeing(layout="tp=2")):
        verdict = gate.decide(whole_run([cell(), record]), rules=RULES + KNOWN)
        assert told(verdict) == []
        assert verdict.cells[SECOND].excused == "https://example.com/issues/1"


def symptomatic(*symptoms: str, **changes: Any) -> CellRecord:
    """Returns the record of a cell that disagrees, as its smallest problem shows."""
    failure = msgspec.structs.replace(disagreeing().failure, symptoms=symptoms)  # type: ignore[type-var]
    return disagreeing(layout="tp=2", failure=failure, **changes)


def wrong_gradient() -> OutputRecord:
    """Returns a gradient that disagrees."""
    return msgspec.structs.replace(disagreeing().outputs[0], name="grad of weight")


KNOWN_WRONG: dict[str, tuple[CellRecord, GateCode, str]] = {
    "gone": (cell(layout="tp=2"), GateCode.CLOSED, "no longer fails; remove it from the policy"),
    "declared and gone": (
        declared(known={"expected": False}, failure=None),
        GateCode.CLOSED,
        "no longer fails; remove it from the policy",
    ),
    "inconclusive": (inconclusive(layout="tp=2"), GateCode.CLOSED, "would have passed every problem"),
    "another output": (
        symptomatic("grad of weight"),
        GateCode.DISAGREE,
        "does not fail in grad of weight, as this does. It disagrees",
    ),
    "another output on another problem": (
        symptomatic("loss", outputs=(*disagreeing().outputs, wrong_gradient()), comparisons=2),
        GateCode.DISAGREE,
        "does not fail in grad of weight, as this does",
    ),
    "ranks that fail": (symptomatic("loss", faults=("Hang",)), GateCode.DISAGREE, "does not fail in Hang, as this"),
    "another way": (
        declared(known={"expected": False}),
        GateCode.DISAGREE,
        "fails in another way than its frozen example. It disagrees",
    ),
    "another name": (
        declared(known={"name": "nll-2"}),
        GateCode.DISAGREE,
        "does not excuse nll-2, which the candidate declares",
    ),
    "another example": (
        declared(known={"example": "0" * 64}),
        GateCode.DISAGREE,
        "has another frozen example than the candidate",
    ),
    "many problems together": (
        disagreeing(layout="tp=2", failure=None),
        GateCode.DISAGREE,
        "is of one problem, and this disagrees only when its problems are pooled",
    ),
}


@pytest.mark.parametrize("wrong", KNOWN_WRONG)
def test_a_known_failure_that_is_another_closes_the_gate(gate: Gate, wrong: str) -> None:
    record, code, message = KNOWN_WRONG[wrong]
    verdict = gate.decide(whole_run([cell(), record]), rules=RULES + KNOWN)
    assert message in only(verdict)[1]
    assert verdict.code is code


@pytest.mark.parametrize(("day", "passes"), [(1, True), (2, False)])
def test_a_known_failure_expires_after_its_last_day(gate: Gate, day: int, passes: bool) -> None:
    rules = (RULES + KNOWN).replace('max_age = "1 day"', "")
    verdict = gate.decide(whole_run([cell(), declared()]), rules=rules, now=datetime(2026, 12, day, 23, tzinfo=UTC))
    assert verdict.passes == passes
    if not passes:
        kind, message = only(verdict)
        assert kind is Kind.DISAGREE
        assert "known failure nll-1 (" in message
        assert "expired on 2026-12-01; mend it, or agree on another day with its owner" in message


def test_a_known_failure_that_the_policy_does_not_have_closes_the_gate(gate: Gate) -> None:
    kind, message = only(gate.decide(whole_run([cell(), declared()])))
    assert kind is Kind.DISAGREE
    assert "the policy has no [[known_failure]] for nll-1; mend it, or add one with its issue" in message
    gone = declared(known={"expected": False}, failure=None)
    kind, message = only(gate.decide(whole_run([cell(), gone])))
    assert (kind, message) == (
        Kind.KNOWN_FAILURE,
        "known failure nll-1 is gone; remove it, and verify again",
    )


def test_a_known_failure_without_evidence_closes_the_gate(gate: Gate) -> None:
    rules = RULES.replace('["single", "tp=2"]', '["single"]') + KNOWN
    kind, message = only(gate.decide(whole_run([cell()]), rules=rules))
    assert kind is Kind.MISSING
    assert "it is a known failure of the policy, and there is no evidence of it" in message
