# SPDX-License-Identifier: Apache-2.0
"""JUnit XML of a verdict, for the test pages of CI systems.

It is written with the standard library. The package ``junitparser`` gives a ``testsuites`` element
an attribute ``skipped``, which the schema of Jenkins forbids. It also uses lxml if that is
installed, and lxml writes other bytes and refuses control characters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum, isfinite
from xml.etree import ElementTree as ET

from lossgate.evidence.summary import CellSummary
from lossgate.gate.gate_verdict import GatedCell, GateReason, GateVerdict
from lossgate.reports.console import one_line, plain
from lossgate.reports.describe import in_pairs
from lossgate.reports.gate_files.findings import GateFinding, GateFindings, of_cell, short_name
from lossgate.reports.resource_lines import resource_lines
from lossgate.reports.shown_verdict import broken_in_words

_GATE = "lossgate.gate"


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A test case. It fails if it has a reason."""

    classname: str
    name: str
    reason: GateReason | None = None
    message: str = ""
    """Why it fails, in one line."""
    text: str = ""
    """Everything that is said of it."""
    seconds: float = 0.0

    @property
    def tag(self) -> str:
        if self.reason is None:
            return "system-out"
        return "failure" if self.reason.is_of_kernel else "error"


def junit_xml(verdict: GateVerdict) -> str:
    """Returns the verdict as JUnit XML.

    The first suite is about the gate. Its first case is the verdict itself, and its other cases are
    the reasons that are about no single cell. Each candidate has a suite with a case for each cell.
    A case has at most one ``failure`` (for a kernel that is wrong) or ``error`` (for any other
    reason), because many readers take only the first. Its text lists all findings.
    """
    gate = _suite(_GATE, list(_gate_cases(GateFindings(verdict))))
    gate.insert(0, _properties(verdict))
    suites = [gate]
    for candidate, cells in groupby(sorted(verdict.cells, key=lambda c: c.key), lambda c: c.key.candidate):
        suites.append(_suite(candidate, list(map(_cell_case, cells))))
    root = ET.Element("testsuites", name="lossgate gate")
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    root.set("time", _time(fsum(float(suite.get("time", "0")) for suite in suites)))
    root.extend(suites)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _gate_cases(findings: GateFindings) -> Iterator[_Case]:
    gravest = next(iter(findings.by_reason), None)
    said = findings.headline
    yield _Case(classname=_GATE, name="verdict", reason=gravest, message=said, text="" if gravest else said)
    for reason, found in findings.by_reason.items():
        if general := [finding for finding in found if finding.cell is None]:
            yield _failing(_GATE, reason.value, general)


def _cell_case(cell: GatedCell) -> _Case:
    seconds = cell.summary.seconds if cell.summary is not None else 0.0
    if not (isfinite(seconds) and seconds > 0):  # evidence may hold anything
        seconds = 0.0
    name = short_name(cell.key)
    if cell.passes:
        return _Case(classname=cell.key.candidate, name=name, text=_note(cell), seconds=seconds)
    return _failing(cell.key.candidate, name, of_cell(cell), seconds)


def _note(cell: GatedCell) -> str:
    """Returns why a cell passes although it does not agree, or remarks on a cell that agrees."""
    if cell.excused:
        return f"excused by a known failure: {cell.excused}"
    if cell.verdict == "AGREE":
        return "" if cell.summary is None else "\n".join(_seen(cell.summary))
    if cell.required and cell.summary is not None:
        return f"{cell.verdict}, but the policy asks only for the numbers: {broken_in_words([cell.summary])}"
    return f"{cell.verdict}, but no rule of the policy asks for this cell"


def _seen(summary: CellSummary) -> Iterator[str]:
    """Yields remarks on a cell, and the resources that a call used."""
    if summary.not_distinguished:
        yield f"not distinguished: {'; '.join(summary.not_distinguished)}"
    if summary.kept:
        yield f"keeps: {', '.join(summary.kept)}"
    if summary.exempt:
        yield f"exempt: {'; '.join(in_pairs(summary.exempt))}"
    if summary.conventions:
        yield f"conventions: {'; '.join(in_pairs(summary.conventions))}"
    if summary.excluded:
        yield f"not given: {'; '.join(in_pairs(summary.excluded))}"
    yield from resource_lines(summary.resources)


def _failing(classname: str, name: str, findings: Sequence[GateFinding], seconds: float = 0.0) -> _Case:
    """Returns a case that fails for its gravest reason. Its text has all reasons."""
    first = next((finding for finding in findings if finding.reason.is_of_kernel), findings[0])
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    lines = list(map(_line, findings))
    if first.replay:
        lines.append(f"replay: {first.replay}")
    return _Case(
        classname=classname,
        name=name,
        reason=first.reason,
        message=f"{first.blocker.sentence}{more}",
        text="\n".join(lines),
        seconds=seconds,
    )


def _line(finding: GateFinding) -> str:
    where = f" ({finding.blocker.where})" if finding.blocker.where else ""
    return f"{finding.reason}: {finding.sentence}{where}"


def _properties(verdict: GateVerdict) -> ET.Element:
    """Returns the policy, the evidence, and its commits and versions."""
    found = [
        ("policy", f"{verdict.policy.file} sha256:{verdict.policy.sha256}"),
        *(("evidence", f"{one.file} sha256:{one.sha256}") for one in verdict.evidence),
        *(("commit", commit) for commit in verdict.commits),
        *(("version", f"{name} {one}") for name in sorted(verdict.versions) for one in verdict.versions[name]),
    ]
    holder = ET.Element("properties")
    for name, value in found:
        ET.SubElement(holder, "property", name=name, value=one_line(value))
    return holder


def _suite(name: str, cases: Sequence[_Case]) -> ET.Element:
    tags = [case.tag for case in cases]
    suite = ET.Element(
        "testsuite",
        name=one_line(name),
        tests=str(len(cases)),
        failures=str(tags.count("failure")),
        errors=str(tags.count("error")),
        skipped="0",
        time=_time(fsum(case.seconds for case in cases)),
    )
    suite.extend(map(_element, cases))
    return suite


def _element(case: _Case) -> ET.Element:
    element = ET.Element(
        "testcase", classname=one_line(case.classname), name=one_line(case.name), time=_time(case.seconds)
    )
    if case.reason is not None:
        attributes = {"type": case.reason.value, "message": one_line(case.message)}
        ET.SubElement(element, case.tag, attributes).text = plain(case.text)
    elif case.text:
        ET.SubElement(element, case.tag).text = plain(case.text)
    return element


def _time(seconds: float) -> str:
    """Returns seconds as the schema wants them: never with an exponent or a fourth decimal."""
    return f"{seconds:.3f}"
