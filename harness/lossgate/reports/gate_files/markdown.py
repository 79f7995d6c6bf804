# SPDX-License-Identifier: Apache-2.0
"""Markdown of a verdict, for a comment on a pull request.

Names and messages come from evidence, so they are written as code, where they can't be markup,
links or mentions of people.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

from lossgate.gate.gate_verdict import Digested, GatedCell, GateVerdict
from lossgate.reports.console import one_line
from lossgate.reports.gate_files.findings import GateFinding, GateFindings, short_name
from lossgate.reports.resource_lines import nearest_to_budgets

MARKER = "<!-- lossgate gate -->"
"""A hidden comment on the first line, by which a workflow finds its own comment again."""
_OF_A_REASON = 5
"""How many findings of a reason are shown at once. The others can be unfolded."""
_LONGEST_MESSAGE = 500
"""The most characters of a message, so that a traceback leaves room for other messages."""
_LEFT_OUT = "- {} more are left out here, because a comment can't be longer\n"
_CUT = "\nThis comment can't be longer; what is left out is in the output of `lossgate gate`.\n"
_LARGEST = 10**9
"""More items than there ever are. Room is kept for a line that says that so many are left out."""


def markdown(verdict: GateVerdict, *, limit: int = 65_000) -> str:
    """Returns the verdict as a comment on a pull request.

    Args:
        verdict: the verdict of the gate.
        limit: the most characters. Items that do not fit are left out, and the comment says how
            many. (GitHub takes 65,536.)
    """
    findings, comment = GateFindings(verdict), Comment(limit)
    comment.must(f"## {findings.headline} {MARKER}\n\n{_table(verdict)}\n")
    for reason, found in findings.by_reason.items():
        heading = f"\n### {reason} ({len(found)})\n\n{reason.meaning} {reason.way_out}\n\n"
        comment.section(heading, map(_item, found[:_OF_A_REASON]), _more(len(found) - _OF_A_REASON))
    for summary, items in _folded(findings):
        comment.section(f"\n<details><summary>{summary}</summary>\n\n", items, "\n</details>\n")
    return comment.text()


def _folded(findings: GateFindings) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields the sections that can be unfolded, each with its name and its items."""
    cells = findings.verdict.cells
    failing = (cell for cell in cells if cell.summary is not None and cell.summary.failure and not cell.passes)
    yield "Disagreements and how to see them again", map(_replay, failing)
    rest = (finding for found in findings.by_reason.values() for finding in found[_OF_A_REASON:])
    yield "All other reasons", (_item(finding, f"{finding.reason}: ") for finding in rest)
    excused = (cell for cell in cells if cell.excused)
    yield "Excused known failures", (f"- {code(str(cell.key))}: {code(cell.excused)}\n" for cell in excused)
    for heading, lines in findings.remarks:
        yield heading, map(_line, lines)
    summaries = (cell.summary for cell in cells if cell.summary is not None)
    used = nearest_to_budgets((one.key.candidate, short_name(one.key), one.resources) for one in summaries)
    yield "Memory and traffic: the cell that comes nearest to each budget", map(_line, used)
    yield "Policy, evidence and versions", _inputs(findings.verdict)


def _table(verdict: GateVerdict) -> str:
    rows = Counter(cell.verdict for cell in verdict.cells)
    closing = Counter(cell.verdict for cell in verdict.cells if not cell.passes)
    excused = Counter(cell.verdict for cell in verdict.cells if cell.excused)
    lines = ["| verdict | cells | excused | keep the gate closed |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {rows[name]} | {excused[name]} | {closing[name]} |" for name in sorted(rows)]
    lines.append(f"| all | {rows.total()} | {excused.total()} | {closing.total()} |")
    return "\n".join(lines) + "\n"


def _more(number: int) -> str:
    return f"- and {number} more like these\n" if number > 0 else ""


def _item(finding: GateFinding, start: str = "") -> str:
    cell = f"{code(str(finding.cell.key))} " if finding.cell is not None else ""
    where = f" ({code(finding.blocker.where)})" if finding.blocker.where else ""
    return f"- {start}{cell}{code(one_line(finding.blocker.sentence, _LONGEST_MESSAGE))}{where}\n"


def _line(text: str) -> str:
    return f"- {code(one_line(text.strip(), _LONGEST_MESSAGE))}\n"


def _replay(cell: GatedCell) -> str:
    assert cell.summary is not None
    failure, command = cell.summary.failure, cell.summary.replay
    assert failure is not None
    problem = code(one_line(failure.description, _LONGEST_MESSAGE))
    replay = f"\n{code_block(command, 'sh')}" if command else ""
    return f"{code(str(cell.key))} on {problem}:\n\n{''.join(map(_line, cell.summary.told))}{replay}\n"


def _inputs(verdict: GateVerdict) -> Iterator[str]:
    def digested(what: str, one: Digested) -> str:
        return f"- {what} {code(one.file)}, SHA-256 {code(one.sha256)}\n"

    yield digested("policy", verdict.policy)
    yield from (digested("evidence", one) for one in verdict.evidence)
    yield from (f"- commit {code(commit)}\n" for commit in verdict.commits)
    yield from (f"- {code(name)} {', '.join(map(code, verdict.versions[name]))}\n" for name in sorted(verdict.versions))


class Comment:
    """Markdown that grows by whole items, up to a limit.

    Args:
        limit: the most characters, counted as JavaScript and GitHub do: an emoji counts two.
    """

    def __init__(self, limit: int) -> None:
        self._parts: list[str] = []
        self._room = limit - _length(_CUT)
        self._cut = False

    def must(self, text: str) -> None:
        """Adds a text even if it is longer than the room that is left."""
        self._parts.append(text)
        self._room -= _length(text)

    def section(self, opening: str, items: Iterable[str], closing: str) -> None:
        """Adds a section with as many of its items as fit, and says how many do not.

        A section without items is left out.
        """
        whole = list(items)
        room = self._room - sum(map(_length, (opening, closing, _LEFT_OUT.format(_LARGEST))))
        lengths = accumulate(map(_length, whole))
        fit = sum(length <= room for length in lengths)
        left_out = ""
        if fit < len(whole):
            self._cut = True
            left_out = _LEFT_OUT.format(len(whole) - fit)
        if fit:
            self.must("".join([opening, *whole[:fit], left_out, closing]))

    def text(self) -> str:
        """Returns the whole comment."""
        return "".join(self._parts) + (_CUT if self._cut else "")


def _length(text: str) -> int:
    """Returns the length in UTF-16, in which characters above U+FFFF count two."""
    return len(text) + sum(char > "\uffff" for char in text)


def code(text: str) -> str:
    """Returns text as a code span, even if it has backticks."""
    line = one_line(text) or " "
    fence = "`" * (_longest_run(line) + 1)
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}"


def code_block(text: str, language: str) -> str:
    """Returns text as a fenced code block of one line."""
    line = one_line(text)
    fence = "`" * max(3, _longest_run(line) + 1)
    return f"{fence}{language}\n{line}\n{fence}\n"


def _longest_run(line: str) -> int:
    """Returns the length of the longest run of backticks."""
    return max(map(len, re.findall("`+", line)), default=0)
