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
from typing import Any

import msgspec

from lossgate import __version__
from lossgate.evidence.records import CellKey
from lossgate.gate.verdict import Blocker, GatedCell, GateVerdict, Kind
from lossgate.reports.gate_files.kinds import MEANINGS
from lossgate.reports.gate_files.places import Places
from lossgate.reports.gate_files.wording import in_words, replay_of
from lossgate.reports.plain import one_line, plain
from lossgate.reports.resource_lines import resource_lines

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_MOST_RESULTS = 25_000
"""GitHub refuses a run with more."""
_MOST_BYTES = 9_500_000
"""GitHub refuses a file of more than 10 MB after gzip. Other zlibs may pack a little worse."""
_LONGEST_MESSAGE = 1_000
_MORE = "more"
"""The rule of the last result, which says how many were left out."""

Json = dict[str, Any]


def sarif(verdict: GateVerdict, *, root: Path | None = None) -> str:
    """Returns the verdict as a SARIF log.

    Each blocker is a result of level ``error``, each excused known failure one of level ``note``.
    Disagreements come first. If there are more than code scanning takes, the last result says how
    many were left out.

    Args:
        root: the folder that paths of sources start from, to find the lines that declare the
            candidates. None reads no file, and shows the first line of each source.
    """
    results = list(_results(verdict, Places(verdict, root)))
    kept = min(len(results), _MOST_RESULTS)
    while True:
        text = _log(verdict, _cut(results, kept))
        if kept <= 1 or len(zlib.compress(text.encode())) <= _MOST_BYTES:
            return text
        kept = kept * 3 // 4


def _cut(results: Sequence[Json], kept: int) -> Sequence[Json]:
    if len(results) <= kept:
        return results
    left_out = results[kept - 1 :]
    level = "error" if any(result["level"] == "error" for result in left_out) else "note"
    message = f"{len(left_out)} more results are left out here, because code scanning takes no more."
    last = {key: left_out[0][key] for key in ("locations",) if key in left_out[0]}
    return [*results[: kept - 1], _result(_MORE, level, message, _fingerprint(_MORE, None, 0), last)]


def _log(verdict: GateVerdict, results: Sequence[Json]) -> str:
    run: Json = {
        "tool": {"driver": {"name": "lossgate", "version": __version__, "rules": list(_rules())}},
        "automationDetails": {"id": "lossgate-gate/"},
        "invocations": [
            {
                "executionSuccessful": True,
                "exitCode": int(verdict.code),
                "exitCodeDescription": one_line(in_words(verdict)),
            }
        ],
        "originalUriBaseIds": {"%SRCROOT%": {"description": {"text": "The root of the sources."}}},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {
            "policy": _digested(verdict.policy.file, verdict.policy.sha256),
            "evidence": [_digested(one.file, one.sha256) for one in verdict.evidence],
            "commits": list(map(plain, verdict.commits)),
            "versions": {plain(name): list(map(plain, found)) for name, found in sorted(verdict.versions.items())},
        },
    }
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(log), indent=1).decode() + "\n"


def _digested(file: str, digest: str) -> Json:
    return {"file": plain(file), "sha256": digest}


def _rules() -> Iterator[Json]:
    for kind, meaning in MEANINGS.items():
        yield _rule(_id(kind), meaning.short, meaning.way_out)
    yield _rule(_MORE, "There are more results than this file holds.", "Look at the output of lossgate gate.")


def _rule(id_: str, short: str, way_out: str) -> Json:
    return {
        "id": id_,
        "name": id_.title().replace("-", ""),
        "shortDescription": {"text": short},
        "fullDescription": {"text": f"{short} {way_out}"},
        "help": {"text": way_out},
        "defaultConfiguration": {"level": "error"},
    }


def _id(kind: Kind) -> str:
    return kind.value.replace(" ", "-")


_INDEX = {rule["id"]: index for index, rule in enumerate(_rules())}


def _results(verdict: GateVerdict, places: Places) -> Iterator[Json]:
    cells = {cell.key: cell for cell in verdict.cells}
    seen: Counter[tuple[Kind, CellKey | None]] = Counter()
    for blocker in sorted(verdict.blockers, key=lambda b: b.kind is not Kind.DISAGREE):
        number = seen[blocker.kind, blocker.cell]
        seen[blocker.kind, blocker.cell] += 1
        cell = cells.get(blocker.cell) if blocker.cell is not None else None
        yield _of_blocker(blocker, cell, number, places)
    yield from _excused(verdict.cells, places)


def _of_blocker(blocker: Blocker, cell: GatedCell | None, number: int, places: Places) -> Json:
    key = blocker.cell
    message = f"{key}: {blocker.message}" if key is not None else blocker.message
    if blocker.kind is Kind.DISAGREE and (replay := replay_of(cell)):
        message = f"{message.rstrip('.')}. Replay: {replay}"
    of_candidate = places.of_candidate(key.candidate, cell.summary if cell else None) if key is not None else None
    related = places.of_evidence(blocker)
    more: Json = {
        **_location(of_candidate or places.of_policy(blocker), key),
        **({"relatedLocations": [{"physicalLocation": related}]} if related else {}),
        **_properties(key, cell, blocker.where),
    }
    return _result(_id(blocker.kind), "error", message, _fingerprint(_id(blocker.kind), key, number), more)


def _excused(cells: Iterable[GatedCell], places: Places) -> Iterator[Json]:
    rule = _id(Kind.KNOWN_FAILURE)
    for cell in cells:
        if cell.excused:
            message = f"{cell.key}: excused by a known failure: {cell.excused}"
            physical = places.of_candidate(cell.key.candidate, cell.summary)
            more = {**_location(physical, cell.key), **_properties(cell.key, cell, "")}
            yield _result(rule, "note", message, _fingerprint("excused", cell.key, 0), more)


def _location(physical: Json | None, key: CellKey | None) -> Json:
    """Returns where a result is shown. Code scanning shows no result that has no file."""
    logical = [{"name": plain(key.candidate), "kind": "function"}] if key is not None else []
    location: Json = {
        **({"physicalLocation": physical} if physical else {}),
        **({"logicalLocations": logical} if logical else {}),
    }
    return {"locations": [location]} if location else {}


def _properties(key: CellKey | None, cell: GatedCell | None, where: str) -> Json:
    found: Json = {"where": plain(where)} if where else {}
    if key is not None:
        found["cell"] = plain(str(key))
    if cell is not None and cell.summary is not None:
        found["evidence"] = {"line": plain(str(cell.summary.where)), "digest": cell.summary.digest}
        if used := list(map(plain, resource_lines(cell.summary.resources))):
            found["used"] = used
    return {"properties": found} if found else {}


def _result(rule: str, level: str, message: str, fingerprint: str, more: Json) -> Json:
    return {
        "ruleId": rule,
        "ruleIndex": _INDEX[rule],
        "level": level,
        "message": {"text": _message(message)},
        # GitHub distinguishes results by primaryLocationLineHash alone. Its own hash of the line
        # would be the same for all cells of a candidate.
        "partialFingerprints": {"primaryLocationLineHash": fingerprint, "lossgateCell/v1": fingerprint},
        **more,
    }


def _message(text: str) -> str:
    """Returns a plain text message: braces are doubled, nothing is a link (section 3.11)."""
    line = one_line(text, _LONGEST_MESSAGE).replace("](", "] (")
    return line.replace("{", "{{").replace("}", "}}")


def _fingerprint(rule: str, key: CellKey | None, number: int) -> str:
    """Returns what identifies a result from run to run: no numbers of the message are in it."""
    parts = [rule, *((key.candidate, key.property, key.layout, key.dtype, key.world, key.device) if key else ())]
    return sha256(json.dumps([*parts, number]).encode()).hexdigest()[:32]
