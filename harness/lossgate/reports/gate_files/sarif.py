# SPDX-License-Identifier: Apache-2.0
"""SARIF 2.1.0 of a verdict, for code scanning.

https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lossgate import __version__
from lossgate.engine.cell_record import CellKey
from lossgate.gate.gate_verdict import Digested, GatedCell, GateReason, GateVerdict
from lossgate.reports.console import one_line, plain
from lossgate.reports.gate_files.findings import GateFinding, GateFindings
from lossgate.reports.gate_files.source_places import SourcePlaces
from lossgate.reports.resource_lines import resource_lines
from lossgate.reports.shown_verdict import broken_in_words

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_MOST_RESULTS = 25_000
"""GitHub refuses a run with more."""
_MOST_BYTES = 9_500_000
"""GitHub refuses a file of more than 10 MB after gzip. Another zlib may compress a little less."""
_LONGEST_MESSAGE = 1_000
_MORE = "more"
"""The rule of the last result, which says how many were left out."""

Json = dict[str, Any]


def sarif(verdict: GateVerdict, *, root: Path | None = None) -> str:
    """Returns the verdict as a SARIF log.

    Each finding is a result of level ``error``, and each excused known failure is a result of level
    ``note``. The gravest come first. If there are more than code scanning takes, the last result
    says how many were left out.

    Args:
        verdict: the verdict of the gate.
        root: the folder from which paths of sources start, to find the lines that declare the
            candidates. None reads no source, and shows its first line.
    """
    findings = GateFindings(verdict)
    results = list(_results(findings, SourcePlaces(verdict, root)))
    kept = min(len(results), _MOST_RESULTS)
    while True:
        text = _log(findings, _cut(results, kept))
        if kept <= 1 or len(zlib.compress(text.encode())) <= _MOST_BYTES:
            return text
        kept = kept * 3 // 4


def _cut(results: Sequence[Json], kept: int) -> Sequence[Json]:
    if len(results) <= kept:
        return results
    left_out = results[kept - 1 :]
    level = "error" if any(result["level"] == "error" for result in left_out) else "note"
    message = f"{len(left_out)} more results are left out here, because code scanning takes no more."
    last = _result(_MORE, level, message, _Same(_MORE, None, 0))
    if "locations" in left_out[0]:
        last["locations"] = left_out[0]["locations"]
    return [*results[: kept - 1], last]


def _log(findings: GateFindings, results: Sequence[Json]) -> str:
    verdict = findings.verdict
    run: Json = {
        "tool": {"driver": {"name": "lossgate", "version": __version__, "rules": list(_rules())}},
        "automationDetails": {"id": "lossgate-gate/"},
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": int(verdict.code),
                "exitCodeDescription": one_line(findings.headline),
            }
        ],
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The root of the sources."}}},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {
            "policy": _digested(verdict.policy),
            "evidence": list(map(_digested, verdict.evidence)),
            "commits": list(map(plain, verdict.commits)),
            "versions": {plain(name): list(map(plain, found)) for name, found in sorted(verdict.versions.items())},
        },
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(log), indent=1).decode() + "\n"


def _digested(one: Digested) -> Json:
    return {"file": plain(one.file), "sha256": one.sha256}


def _rules() -> Iterator[Json]:
    for reason in GateReason:
        yield _rule(_id(reason), reason.meaning, reason.way_out)
    yield _rule(_MORE, "There are more results than this file holds.", "Look at the output of lossgate gate.")


def _rule(id_: str, meaning: str, way_out: str) -> Json:
    return {
        "id": id_,
        "name": id_.title().replace("-", ""),
        "shortDescription": {"text": meaning},
        "fullDescription": {"text": f"{meaning} {way_out}"},
        "help": {"text": way_out},
        "defaultConfiguration": {"level": "error"},
    }


def _id(reason: GateReason) -> str:
    return reason.value.replace(" ", "-")


_INDEX = {rule["id"]: index for index, rule in enumerate(_rules())}


class _Same(NamedTuple):
    """Identifies a result in several runs. Messages can't, because their numbers may change."""

    rule: str
    key: CellKey | None
    number: int
    """Its number among the results of this rule on this cell."""

    @property
    def fingerprint(self) -> str:
        key = msgspec.structs.astuple(self.key) if self.key else ()
        return sha256(json.dumps([self.rule, *key, self.number]).encode()).hexdigest()[:32]


def _results(findings: GateFindings, places: SourcePlaces) -> Iterator[Json]:
    seen: Counter[tuple[str, CellKey | None]] = Counter()
    for finding in findings.all:
        rule, key = _id(finding.reason), finding.blocker.cell
        yield _of_finding(finding, _Same(rule, key, seen[rule, key]), places)
        seen[rule, key] += 1
    yield from _let_pass(findings.verdict.cells, places)


def _of_finding(finding: GateFinding, same: _Same, places: SourcePlaces) -> Json:
    cell, message = finding.cell, finding.sentence
    if replay := finding.replay:
        message = f"{message.rstrip('.')}. Replay: {replay}"
    result = _result(same.rule, "error", message, same)
    declared = places.of_candidate(cell.key.candidate, cell.summary) if cell is not None else None
    physical = declared or places.of_policy(finding)
    if physical or cell:
        result["locations"] = [_location(physical, cell)]
    if related := places.of_evidence(finding):
        result["relatedLocations"] = [{"physicalLocation": related}]
    return result | _properties(cell, finding.blocker.where)


def _let_pass(cells: Iterable[GatedCell], places: SourcePlaces) -> Iterator[Json]:
    """Yields a note for each cell that passes although it is a known failure or breaks promises."""
    for cell in cells:
        reason, why = None, ""
        if cell.excused:
            reason, why = GateReason.KNOWN_FAILURE, f"excused by a known failure: {cell.excused}"
        elif cell.passes and cell.summary is not None and (broken := broken_in_words([cell.summary])):
            reason, why = GateReason.PROMISE_BROKEN, f"{broken}; the policy asks only for the numbers"
        if reason is not None:
            result = _result(_id(reason), "note", f"{cell.key}: {why}", _Same("excused", cell.key, 0))
            result["locations"] = [_location(places.of_candidate(cell.key.candidate, cell.summary), cell)]
            yield result | _properties(cell)


def _location(physical: Json | None, cell: GatedCell | None) -> Json:
    """Returns where a result is shown. Code scanning shows only results with a file."""
    location: Json = {"physicalLocation": physical} if physical else {}
    if cell is not None:
        location["logicalLocations"] = [{"name": plain(cell.key.candidate), "kind": "function"}]
    return location


def _properties(cell: GatedCell | None, where: str = "") -> Json:
    found: Json = {"where": plain(where)} if where else {}
    if cell is not None:
        found["cell"] = plain(str(cell.key))
    if cell is not None and cell.summary is not None:
        found["evidence"] = {"line": plain(str(cell.summary.where)), "digest": cell.summary.digest}
        if used := list(map(plain, resource_lines(cell.summary.resources))):
            found["used"] = used
    return {"properties": found} if found else {}


def _result(rule: str, level: str, message: str, same: _Same) -> Json:
    return {
        "ruleId": rule,
        "ruleIndex": _INDEX[rule],
        "level": level,
        "message": {"text": _message(message)},
        # GitHub distinguishes results by primaryLocationLineHash alone. Its own hash of the line
        # would be the same for all cells of a candidate.
        "partialFingerprints": {
            "primaryLocationLineHash": same.fingerprint,
            "lossgateCell/v1": same.fingerprint,
        },
    }


def _message(text: str) -> str:
    """Returns a message in plain text: it has doubled braces and no links (section 3.11)."""
    line = one_line(text, _LONGEST_MESSAGE).replace("](", "] (")
    return line.replace("{", "{{").replace("}", "}}")
