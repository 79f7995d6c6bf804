# SPDX-License-Identifier: Apache-2.0
"""An in-toto statement of a verdict, for a release pipeline to sign.

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.gate.gate_verdict import Digested, GateVerdict
from lossgate.reports.console import plain

_STATEMENT = "https://in-toto.io/Statement/v1"
_TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""The whole name of a commit in git, a SHA-1 or a SHA-256."""

Json = dict[str, Any]


def statement(verdict: GateVerdict, subjects: Sequence[Digested] = ()) -> str:
    """Returns the verdict as an in-toto statement with a test-result predicate.

    Each cell is a test. A cell has warned if it passes although it does not agree, because a known
    failure excuses it, no rule asks for it, or only its numbers count. A reason that is about no
    single cell is a failed test ``gate: REASON``.

    Args:
        verdict: the verdict of the gate.
        subjects: the files that are released. If there are none, the statement is about the commits
            that the evidence names and the sources of the candidates.

    Raises:
        UsageError: if the statement has no subject.
    """
    passed, warned, failed = _tests(verdict)
    if_passed = "WARNED" if warned else "PASSED"
    predicate: Json = {
        "result": if_passed if verdict.passes else "FAILED",
        "configuration": [
            _file(verdict.policy, "policy"),
            *(_file(one, "evidence") for one in verdict.evidence),
        ],
        "passedTests": passed,
        "warnedTests": warned,
        "failedTests": failed,
    }
    whole = {
        "_type": _STATEMENT,
        "subject": _subjects(verdict, subjects),
        "predicateType": _TEST_RESULT,
        "predicate": predicate,
    }
    return json.dumps(whole, ensure_ascii=False, sort_keys=True, separators=(",", ":")) + "\n"


def _tests(verdict: GateVerdict) -> tuple[list[str], list[str], list[str]]:
    """Returns the names of the tests that passed, that warned, and that failed."""
    passed: list[str] = []
    warned: list[str] = []
    failed = [f"gate: {reason}" for reason in dict.fromkeys(blocker.reason for blocker in verdict.general)]
    for cell in verdict.cells:
        name = plain(str(cell.key))
        if not cell.passes:
            failed.append(name)
        elif cell.verdict == "AGREE":
            passed.append(name)
        else:
            warned.append(name)
    return passed, warned, failed


def _file(one: Digested, role: str | None = None) -> Json:
    """Returns a file as a resource descriptor."""
    described: Json = {"name": plain(one.file), "digest": {"sha256": one.sha256}}
    return {**described, "annotations": {"role": role}} if role else described


def _subjects(verdict: GateVerdict, subjects: Sequence[Digested]) -> list[Json]:
    found = list(map(_file, subjects or ())) or [*_commits(verdict), *map(_file, verdict.sources)]
    if not found:
        raise UsageError(
            "the in-toto statement has no subject: the evidence names neither a commit nor the files of the "
            "candidates. Name the files that are released: --subject dist/kernels.whl"
        )
    return found


def _commits(verdict: GateVerdict) -> Iterator[Json]:
    """Yields the commits. They need no names, because the key ``gitCommit`` says what they are."""
    return ({"digest": {"gitCommit": one}} for one in verdict.commits if _COMMIT.fullmatch(one))
