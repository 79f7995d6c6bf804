# SPDX-License-Identifier: Apache-2.0
"""Tests of known failures: they excuse what they name, until they expire, and nothing else."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from lossgate.engine.cell_record import CellRecord
from lossgate.engine.output_record import OutputRecord
from lossgate.gate.gate_verdict import GateCode, GateReason
from property_tests.meta.gate_decisions.decided import KNOWN, RULES, SECOND, Gate, declared, only, reported
from property_tests.meta.made_evidence import (
    cell,
    disagreeing,
    inconclusive,
    whole_run,
)


def test_a_known_failure_is_excused(gate: Gate) -> None:
    for record in (declared(), disagreeing(layout="tp=2")):
        verdict = gate.decide(whole_run([cell(), record]), rules=RULES + KNOWN)
        assert reported(verdict) == []
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
        "does not fail in grad of weight, as this cell does. It disagrees",
    ),
    "another output on another problem": (
        symptomatic("loss", outputs=(*disagreeing().outputs, wrong_gradient()), comparisons=2),
        GateCode.DISAGREE,
        "does not fail in grad of weight, as this cell does",
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
        "is of one problem, but this cell disagrees only over all problems pooled",
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
        assert kind is GateReason.DISAGREE
        assert "known failure nll-1 (" in message
        assert "expired on 2026-12-01; mend it, or agree on another day with its owner" in message


def test_a_known_failure_that_the_policy_does_not_have_closes_the_gate(gate: Gate) -> None:
    kind, message = only(gate.decide(whole_run([cell(), declared()])))
    assert kind is GateReason.DISAGREE
    assert "the policy has no [[known_failure]] for nll-1; mend the kernel, or add one with its issue" in message
    gone = declared(known={"expected": False}, failure=None)
    kind, message = only(gate.decide(whole_run([cell(), gone])))
    assert (kind, message) == (
        GateReason.KNOWN_FAILURE,
        "the candidate declares the known failure nll-1, which is gone; remove it there, and verify again",
    )


def test_a_known_failure_without_evidence_closes_the_gate(gate: Gate) -> None:
    rules = RULES.replace('["single", "tp=2"]', '["single"]') + KNOWN
    kind, message = only(gate.decide(whole_run([cell()]), rules=rules))
    assert kind is GateReason.MISSING
    assert "it is a known failure of the policy, but there is no evidence of it" in message
