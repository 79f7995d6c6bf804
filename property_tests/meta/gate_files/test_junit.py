# SPDX-License-Identifier: Apache-2.0
"""Tests of JUnit XML: its schema, and what a CI system counts."""

from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import xmlschema
from junitparser import JUnitXml

from lossgate.engine.cell_record import PropertyRecord
from lossgate.gate.gate_verdict import Blocker, GatedCell, GateReason, GateVerdict
from lossgate.reports.gate_files.junit import junit_xml
from property_tests.meta.gate_files.verdicts import (
    EXEMPT,
    ISSUE,
    VERDICTS,
    agreeing,
    blocked,
    excused,
    key,
    many,
    of_gate,
    summary,
    verdict,
)

SCHEMA = Path(__file__).parent / "schemas/junit-10.xsd"


@cache
def schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(SCHEMA)


def tree(judged: GateVerdict) -> ET.Element:
    return ET.fromstring(junit_xml(judged).encode())


def case(judged: GateVerdict, name: str) -> ET.Element:
    (found,) = (one for one in tree(judged).iter("testcase") if one.get("name") == name)
    return found


@pytest.mark.parametrize("name", VERDICTS)
def test_the_file_is_valid(name: str) -> None:
    schema().validate(junit_xml(VERDICTS[name]))


def test_a_large_file_is_valid() -> None:
    schema().validate(junit_xml(many(300)))


@pytest.mark.parametrize("broken", ['tests="', 'name="verdict"', "</testsuites>"])
def test_the_schema_finds_what_is_broken(broken: str) -> None:
    text = junit_xml(VERDICTS["open"]).replace(broken, "", 1)
    with pytest.raises((xmlschema.XMLSchemaException, ET.ParseError)):
        schema().validate(text)


@pytest.mark.parametrize("name", VERDICTS)
def test_a_closed_gate_never_looks_open(name: str) -> None:
    """A reader that sums up the attributes, or that counts elements, sees what the gate says."""
    judged, read = VERDICTS[name], JUnitXml.fromstring(junit_xml(VERDICTS[name]).encode())
    stated = (read.tests, read.failures, read.errors)
    read.update_statistics()
    assert stated == (read.tests, read.failures, read.errors)
    assert (read.failures + read.errors == 0) == judged.passes
    assert any(suite.name == "lossgate.gate" for suite in read)


@pytest.mark.parametrize("kind", GateReason)
def test_only_a_kernel_that_is_wrong_is_a_failure(kind: GateReason) -> None:
    tag = "failure" if kind in (GateReason.DISAGREE, GateReason.PROMISE_BROKEN) else "error"
    for judged in (verdict([blocked(key(), kind)]), verdict([], of_gate(kind))):
        assert {one.tag for one in tree(judged).iter() if one.get("type")} == {tag}
        assert {one.get("type") for one in tree(judged).iter(tag)} == {kind.value}


def test_a_case_with_several_blockers_has_one_result_that_lists_all() -> None:
    blockers = tuple(
        Blocker(reason=kind, message=f"It is {kind}.", cell=key(), where="out.jsonl:3")
        for kind in (GateReason.STALE, GateReason.DISAGREE, GateReason.WEAK)
    )
    judged = verdict([GatedCell(key=key(), summary=summary(key(), "DISAGREE"), blockers=blockers)])
    (result,) = case(judged, "agreement-single-float32")
    assert (result.tag, result.get("message")) == ("failure", "It is disagree. (and 2 more)")
    lines = [f"{b.reason}: {key()}: It is {b.reason}. (out.jsonl:3)" for b in blockers]
    assert (result.text or "").splitlines() == [*lines, "replay: lossgate replay failures/one.json"]


def test_only_a_disagreement_has_its_replay_command() -> None:
    stale = Blocker(reason=GateReason.STALE, message="It is old.", cell=key())
    judged = verdict([GatedCell(key=key(), summary=summary(key(), "DISAGREE"), blockers=(stale,))])
    (result,) = case(judged, "agreement-single-float32")
    assert "replay" not in (result.text or "")


def test_suites_are_the_gate_and_the_candidates() -> None:
    judged = verdict([agreeing(key("b")), agreeing(key("a")), agreeing(key("a", layout="cp=2")), excused(key("c"))])
    suites = [(suite.get("name"), len(suite.findall("testcase"))) for suite in tree(judged)]
    assert suites == [("lossgate.gate", 1), ("a", 2), ("b", 1), ("c", 1)]


def test_a_case_tells_layout_world_and_time() -> None:
    judged = verdict([agreeing(key("a", layout="tp=2", world="gloo", device="cuda"))])
    found = case(judged, "agreement-tp=2-float32 on gloo/cuda")
    assert (found.get("classname"), found.get("time")) == ("a", "1.500")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e-9, 1e12])
def test_a_time_is_valid_whatever_the_evidence_says(seconds: float) -> None:
    judged = verdict([GatedCell(key=key(), summary=summary(key(), seconds=seconds))])
    schema().validate(junit_xml(judged))


def test_an_excused_known_failure_passes_with_its_issue() -> None:
    (out,) = case(verdict([excused(key())]), "agreement-single-float32")
    assert (out.tag, out.text) == ("system-out", f"excused by a known failure: {ISSUE}")


def test_a_cell_says_which_choices_were_not_distinguished() -> None:
    alike = GatedCell(key=key(), summary=summary(key(), not_distinguished=("mode a and b", "epsilon 0 and 1")))
    _, cell = ET.fromstring(junit_xml(verdict([alike]))).iter("system-out")
    assert cell.text == "not distinguished: mode a and b; epsilon 0 and 1"


def test_a_cell_says_to_which_properties_it_was_held() -> None:
    kept = [PropertyRecord(name=name, problems=1) for name in ("no-grad", "microbatches")]
    result = summary(key(), properties=(*kept, *EXEMPT))
    _, cell = ET.fromstring(junit_xml(verdict([GatedCell(key=key(), summary=result)]))).iter("system-out")
    assert cell.text == "keeps: no-grad, microbatches\nexempt: masked-nan: it multiplies"


def test_a_cell_says_which_problems_it_was_not_given() -> None:
    narrow = summary(key(), excluded={"ratios extreme": "they are clamped", "empty rank": "the sampler fills all"})
    _, cell = ET.fromstring(junit_xml(verdict([GatedCell(key=key(), summary=narrow)]))).iter("system-out")
    assert cell.text == "not given: ratios extreme: they are clamped; empty rank: the sampler fills all"


def test_a_cell_says_what_a_call_used() -> None:
    kept = summary(key(), resources={"peak": {"bytes": 4096.0, "forward": 4096.0, "backward": 8.0, "budget": 8192.0}})
    _, cell = ET.fromstring(junit_xml(verdict([GatedCell(key=key(), summary=kept)]))).iter("system-out")
    assert cell.text == "peak: 4,096 bytes of a budget of 8,192 (4,096 in forward, 8 in backward)"


def test_a_cell_that_nobody_asks_for_says_so() -> None:
    gate, cell = tree(VERDICTS["open, with a cell that nobody asks for"]).iter("system-out")
    assert gate.text == "The gate is open: 2 cells"
    assert cell.text == "INCONCLUSIVE, but no rule of the policy asks for this cell"
