# SPDX-License-Identifier: Apache-2.0
"""JUnit XML of a verdict, for the test pages of CI systems.

It is written with the standard library. The package ``junitparser`` gives a ``testsuites`` element
an attribute ``skipped`` that the schema of Jenkins forbids, and uses lxml where that is installed,
which writes other bytes and refuses control characters.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import fsum, isfinite
from typing import NamedTuple
from xml.etree import ElementTree as ET

from lossgate.gate.verdict import Blocker, GatedCell, GateVerdict, Kind
from lossgate.reports.gate_files.wording import by_cell, in_words, note, replay_of, short_name
from lossgate.reports.plain import one_line, plain

_GATE = "lossgate.gate"


class _Outcome(NamedTuple):
    """Why a test case does not pass."""

    kind: Kind
    message: str
    text: str = ""

    @property
    def tag(self) -> str:
        return "failure" if self.kind is Kind.DISAGREE else "error"


class _Case(NamedTuple):
    classname: str
    name: str
    outcome: _Outcome | None
    seconds: float = 0.0
    note: str = ""


def junit_xml(verdict: GateVerdict) -> str:
    """Returns the verdict as JUnit XML.

    One suite is that of the gate: its first case is the verdict itself, its others are what
    concerns no single cell. Each candidate has a suite with a case for each cell. A case has at
    most one ``failure`` (for a disagreement) or ``error`` (for anything else), because many
    readers take only the first; its text lists all blockers.
    """
    general, of_cells = by_cell(verdict)
    suites = [_suite(_GATE, list(_gate_cases(verdict, general)), _properties(verdict))]
    for candidate, cells in groupby(sorted(verdict.cells, key=lambda c: c.key), lambda c: c.key.candidate):
        suites.append(_suite(candidate, [_cell_case(cell, of_cells[cell.key]) for cell in cells]))
    root = ET.Element("testsuites", name="lossgate gate")
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    root.set("time", _time(fsum(float(suite.get("time", "0")) for suite in suites)))
    root.extend(suites)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _gate_cases(verdict: GateVerdict, general: Sequence[Blocker]) -> Iterator[_Case]:
    sentence = in_words(verdict)
    outcome = None if verdict.passes else _Outcome(_worst(verdict.blockers).kind, sentence)
    yield _Case(_GATE, "verdict", outcome, note=sentence)
    for kind in Kind:
        if found := [blocker for blocker in general if blocker.kind is kind]:
            yield _Case(_GATE, kind.value, _outcome(found))


def _cell_case(cell: GatedCell, blockers: Sequence[Blocker]) -> _Case:
    seconds = cell.summary.seconds if cell.summary is not None else 0.0
    outcome = _outcome(blockers, replay_of(cell)) if blockers else None
    return _Case(cell.key.candidate, short_name(cell.key), outcome, seconds, "" if blockers else note(cell))


def _worst(blockers: Sequence[Blocker]) -> Blocker:
    return next((blocker for blocker in blockers if blocker.kind is Kind.DISAGREE), blockers[0])


def _outcome(blockers: Sequence[Blocker], replay: str = "") -> _Outcome:
    worst = _worst(blockers)
    more = f" (and {len(blockers) - 1} more)" if len(blockers) > 1 else ""
    command = [f"replay: {replay}"] if replay and worst.kind is Kind.DISAGREE else []
    return _Outcome(worst.kind, f"{worst.message}{more}", "\n".join([*map(_line, blockers), *command]))


def _line(blocker: Blocker) -> str:
    cell = f"{blocker.cell}: " if blocker.cell is not None else ""
    return f"{blocker.kind}: {cell}{blocker.message}{f' ({blocker.where})' if blocker.where else ''}"


def _properties(verdict: GateVerdict) -> Iterator[tuple[str, str]]:
    yield "policy", f"{verdict.policy.file} sha256:{verdict.policy.sha256}"
    yield from (("evidence", f"{one.file} sha256:{one.sha256}") for one in verdict.evidence)
    yield from (("commit", commit) for commit in verdict.commits)
    yield from (("version", f"{name} {one}") for name in sorted(verdict.versions) for one in verdict.versions[name])


def _suite(name: str, cases: Sequence[_Case], properties: Iterable[tuple[str, str]] = ()) -> ET.Element:
    tags = [case.outcome.tag for case in cases if case.outcome is not None]
    suite = ET.Element(
        "testsuite",
        name=one_line(name),
        tests=str(len(cases)),
        failures=str(tags.count("failure")),
        errors=str(tags.count("error")),
        skipped="0",
        time=_time(fsum(_seconds(case) for case in cases)),
    )
    if pairs := list(properties):
        holder = ET.SubElement(suite, "properties")
        for key, value in pairs:
            ET.SubElement(holder, "property", name=key, value=one_line(value))
    suite.extend(map(_element, cases))
    return suite


def _element(case: _Case) -> ET.Element:
    element = ET.Element(
        "testcase", classname=one_line(case.classname), name=one_line(case.name), time=_time(_seconds(case))
    )
    if case.outcome is not None:
        attributes = {"type": case.outcome.kind.value, "message": one_line(case.outcome.message)}
        ET.SubElement(element, case.outcome.tag, attributes).text = plain(case.outcome.text)
    if case.note:
        ET.SubElement(element, "system-out").text = plain(case.note)
    return element


def _seconds(case: _Case) -> float:
    """Returns the time of a case; 0 if evidence has nonsense for it."""
    return case.seconds if isfinite(case.seconds) and case.seconds > 0 else 0.0


def _time(seconds: float) -> str:
    """Returns seconds as the schema wants them: never with an exponent or a fourth decimal."""
    return f"{seconds:.3f}"
