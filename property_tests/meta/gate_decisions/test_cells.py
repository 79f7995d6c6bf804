# SPDX-License-Identifier: Apache-2.0
"""Tests of what the gate asks of cells: each thing that is wrong with one closes it."""

from hashlib import sha256

import msgspec
import pytest

from lossgate.engine.cell_record import CellRecord
from lossgate.gate.gate_verdict import GateCode, GateReason
from property_tests.meta.gate_decisions.decided import CELLS, RULES, Gate, only, reported
from property_tests.meta.made_evidence import (
    COMMIT,
    breaking,
    cell,
    disagreeing,
    inconclusive,
    output,
    whole_run,
)


def test_good_evidence_opens_the_gate(gate: Gate) -> None:
    verdict = gate.decide(whole_run(CELLS))
    assert reported(verdict) == []
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


ONE_WRONG: dict[str, tuple[CellRecord | None, GateCode, GateReason, str]] = {
    "it disagrees": (
        disagreeing(layout="tp=2"),
        GateCode.DISAGREE,
        GateReason.DISAGREE,
        "it disagrees: loss: 1.01 times the reference",
    ),
    "it breaks a promise": (
        breaking(layout="tp=2"),
        GateCode.DISAGREE,
        GateReason.PROMISE_BROKEN,
        "its numbers agree, but it breaks masked-nan: property masked-nan: loss: NaN",
    ),
    "it is inconclusive": (
        inconclusive(layout="tp=2"),
        GateCode.CLOSED,
        GateReason.INCONCLUSIVE,
        "a kernel that computes label_smoothing=0.1 as 0 would have passed every problem",
    ),
    "it is missing": (
        None,
        GateCode.CLOSED,
        GateReason.MISSING,
        "nll: no cell with layout tp=2, dtype float32",
    ),
    "its verdict is flipped": (
        disagreeing(layout="tp=2", verdict="AGREE"),
        GateCode.CLOSED,
        GateReason.CONTRADICTORY,
        "the line contradicts its own numbers: its verdict is AGREE, but its numbers give DISAGREE. Verify again",
    ),
    "a number is changed": (
        cell(layout="tp=2", outputs=(output(scale=(1e-8, 3e-7, 0.5e-8)),)),
        GateCode.CLOSED,
        GateReason.CONTRADICTORY,
        "loss has a pooled scale of",
    ),
}


@pytest.mark.parametrize("wrong", ONE_WRONG)
def test_one_cell_that_is_wrong_closes_the_gate(gate: Gate, wrong: str) -> None:
    record, code, kind, message = ONE_WRONG[wrong]
    verdict = gate.decide(whole_run([cell(), *([record] if record else [])]))
    found = reported(verdict)
    assert kind in {what for what, _ in found}
    assert any(message in text for _, text in found), found
    assert verdict.code is code
    assert not verdict.passes


def test_an_error_that_could_have_stayed_hidden_closes_the_gate(gate: Gate) -> None:
    rules = RULES.replace("min_problems = 3", "min_problems = 3\nmax_mde = 1e-6")
    kinds = [what for what, _ in reported(gate.decide(whole_run(CELLS), rules=rules))]
    assert kinds == [GateReason.WEAK, GateReason.WEAK]


def test_the_strictest_of_several_rules_counts(gate: Gate) -> None:
    more = '[[require]]\ncandidates = ["*"]\nmin_problems = 100\n'
    found = reported(gate.decide(whole_run(CELLS), rules=RULES + more))
    assert [what for what, _ in found] == [GateReason.WEAK] * 2
    assert all("it has 8 problems, but the policy asks for 100; raise --examples" in text for _, text in found)


def test_cells_that_no_rule_asks_for_do_not_have_to_be_conclusive(gate: Gate) -> None:
    verdict = gate.decide(whole_run([*CELLS, inconclusive(candidate="other")]))
    assert verdict.passes
    assert [c.required for c in verdict.cells] == [True, True, False]


def test_a_cell_that_disagrees_closes_the_gate_though_no_rule_asks_for_it(gate: Gate) -> None:
    verdict = gate.decide(whole_run([*CELLS, disagreeing(candidate="other")]))
    assert only(verdict)[0] is GateReason.DISAGREE


def test_nothing_is_no_evidence(gate: Gate) -> None:
    kinds = {what for what, _ in reported(gate.decide([]))}
    assert kinds == {GateReason.EMPTY, GateReason.MISSING}
    assert gate.decide([]).code is GateCode.CLOSED


def test_exact_copies_of_evidence_count_once(gate: Gate) -> None:
    assert gate.decide(whole_run(CELLS), whole_run(CELLS)).passes


def test_two_runs_with_the_same_numbers_agree(gate: Gate) -> None:
    later = [msgspec.structs.replace(one, seconds=9.0, time="2026-11-20T13:00:00+00:00") for one in CELLS]
    assert gate.decide(whole_run(CELLS), whole_run(later, run="run-2")).passes


def test_two_runs_with_other_numbers_close_the_gate(gate: Gate) -> None:
    other = output(shares={"noise": (0.25, 0.4, 0.125)})
    later = [cell(time="2026-11-20T13:00:00+00:00", outputs=(other,))]
    kind, message = only(gate.decide(whole_run(CELLS), whole_run(later, run="run-2")))
    assert kind is GateReason.CONTRADICTORY
    assert message.endswith("0.jsonl:2: the two differ in a number. Verify again, into a new file")


def test_another_verdict_of_the_same_cell_closes_the_gate(gate: Gate) -> None:
    kinds = {what for what, _ in reported(gate.decide(whole_run(CELLS), whole_run([inconclusive()], run="run-2")))}
    assert GateReason.CONTRADICTORY in kinds


def test_every_result_of_a_cell_counts(gate: Gate) -> None:
    """A newer result does not hide an older one."""
    older = [disagreeing(time="2026-11-20T12:00:10+00:00", candidate="other")]
    verdict = gate.decide(
        whole_run(CELLS), whole_run(older, run="run-2"), whole_run([cell(candidate="other")], run="run-3")
    )
    assert {what for what, _ in reported(verdict)} == {GateReason.CONTRADICTORY, GateReason.DISAGREE}
    assert verdict.code is GateCode.DISAGREE


def test_a_line_that_contradicts_itself_is_no_disagreement(gate: Gate) -> None:
    verdict = gate.decide(whole_run([cell(), cell(layout="tp=2", verdict="DISAGREE", reasons=("none",))]))
    assert only(verdict)[0] is GateReason.CONTRADICTORY
