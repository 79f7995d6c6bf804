# SPDX-License-Identifier: Apache-2.0
"""Tests of the in-toto statement, by the messages that in-toto publishes."""

import json
import re
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.test_result.v0.test_result_pb2 import TestResult as Predicate
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

from lossgate.base.errors import UsageError
from lossgate.engine.cell_record import PropertyRecord
from lossgate.gate.gate_verdict import Digested, GatedCell, GateReason, GateVerdict
from lossgate.reports.gate_files.statement import statement
from property_tests.meta.gate_files.verdicts import (
    COMMIT,
    EVIDENCE,
    POLICY,
    SOURCE,
    VERDICTS,
    agreeing,
    blocked,
    excused,
    key,
    of_gate,
    summary,
    verdict,
)

WHEEL = Digested(file="dist/kernels.whl", sha256="f" * 64)


def parsed(text: str) -> Statement:
    """Returns a statement as in-toto's messages read it: they refuse unknown fields."""
    found = Statement.copy_from_pb(json_format.Parse(text, StatementMessage()))
    found.validate()
    predicate = json_format.ParseDict(json_format.MessageToDict(found.pb.predicate), Predicate())
    for one in predicate.configuration:
        ResourceDescriptor.copy_from_pb(one).validate()
        assert one.digest
    return found


def predicate(judged: GateVerdict) -> dict[str, Any]:
    return json.loads(statement(judged, [WHEEL]))["predicate"]


def subjects(judged: GateVerdict, *given: Digested) -> list[dict[str, Any]]:
    return json.loads(statement(judged, given))["subject"]


@pytest.mark.parametrize("name", VERDICTS)
def test_the_statement_is_valid(name: str) -> None:
    parsed(statement(VERDICTS[name], [WHEEL]))
    parsed(statement(VERDICTS[name]))


@pytest.mark.parametrize(
    ("right", "broken"),
    [
        ("https://in-toto.io/Statement/v1", "https://in-toto.io/Statement/v0.1"),
        ('"predicateType":', '"predicate_kind":'),
        ('"passedTests":', '"passed":'),
        ('"subject":[', '"subject":[{"name":"a"},'),
        (f'"digest":{{"sha256":"{POLICY.sha256}"}}', '"digests":{}'),
    ],
)
def test_the_messages_find_what_is_broken(right: str, broken: str) -> None:
    text = statement(VERDICTS["open"])
    assert right in text
    with pytest.raises((ValueError, json_format.ParseError)):
        parsed(text.replace(right, broken, 1))


def test_types_are_those_of_the_specification() -> None:
    text = statement(VERDICTS["open"])
    assert json.loads(text)["_type"] == "https://in-toto.io/Statement/v1"
    assert json.loads(text)["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


KEPT = (PropertyRecord(name="no-grad", problems=1),)


@pytest.mark.parametrize(
    ("judged", "result", "passed", "warned", "failed"),
    [
        (verdict([agreeing(key())]), "PASSED", [key()], [], []),
        (
            verdict([GatedCell(key=key(), summary=summary(key(), properties=KEPT, not_distinguished=("a and b",)))]),
            "PASSED",
            [key()],
            [],
            [],
        ),
        (verdict([agreeing(key()), excused(key("b"))]), "WARNED", [key()], [key("b")], []),
        (VERDICTS["open, with a cell that nobody asks for"], "WARNED", [key()], [key("other")], []),
        (verdict([excused(key()), blocked(key("b"), GateReason.WEAK)]), "FAILED", [], [key()], [key("b")]),
        (
            verdict([agreeing(key())], of_gate(GateReason.MIXED), of_gate(GateReason.MIXED)),
            "FAILED",
            [key()],
            [],
            ["gate: mixed"],
        ),
        (
            verdict([blocked(key(), GateReason.MISSING)], of_gate(GateReason.EMPTY)),
            "FAILED",
            [],
            [],
            ["gate: empty", key()],
        ),
    ],
)
def test_cells_are_tests(
    judged: GateVerdict, result: str, passed: list[Any], warned: list[Any], failed: list[Any]
) -> None:
    found = predicate(judged)
    assert found["result"] == result
    assert found["passedTests"] == list(map(str, passed))
    assert found["warnedTests"] == list(map(str, warned))
    assert found["failedTests"] == list(map(str, failed))


@pytest.mark.parametrize("name", VERDICTS)
def test_only_an_open_gate_has_not_failed(name: str) -> None:
    judged, found = VERDICTS[name], predicate(VERDICTS[name])
    assert (found["result"] == "FAILED") == (not judged.passes) == bool(found["failedTests"])
    tests = [test for tests in ("passedTests", "warnedTests", "failedTests") for test in found[tests]]
    assert sum(not test.startswith("gate: ") for test in tests) == len(judged.cells)


def test_policy_and_evidence_are_bound_by_digest() -> None:
    assert predicate(VERDICTS["open"])["configuration"] == [
        {"name": POLICY.file, "digest": {"sha256": POLICY.sha256}, "annotations": {"role": "policy"}},
        {"name": EVIDENCE.file, "digest": {"sha256": EVIDENCE.sha256}, "annotations": {"role": "evidence"}},
    ]


def test_the_subject_is_what_is_released_or_else_what_was_verified() -> None:
    source = {"name": SOURCE.file, "digest": {"sha256": SOURCE.sha256}}
    assert subjects(VERDICTS["open"], WHEEL) == [{"name": WHEEL.file, "digest": {"sha256": WHEEL.sha256}}]
    assert subjects(VERDICTS["open"]) == [{"digest": {"gitCommit": COMMIT}}, source]
    assert subjects(verdict([], commits=("ab" * 32,), sources=())) == [{"digest": {"gitCommit": "ab" * 32}}]


@pytest.mark.parametrize("commits", [(), ("HEAD",), (COMMIT.upper(),), (COMMIT + "\n",), ("",)])
def test_what_is_no_commit_is_no_subject(commits: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=re.escape("Name the files that are released: --subject dist/kernels.whl")):
        statement(verdict([], commits=commits, sources=()))
