# SPDX-License-Identifier: Apache-2.0
"""Markdown of a verdict, for a comment on a pull request.

Names and messages come from evidence, so they stand in code: there they are no markup and no links,
and they mention nobody.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from lossgate.gate.verdict import Blocker, Digested, GatedCell, GateVerdict, Kind
from lossgate.reports.gate_files.kinds import MEANINGS
from lossgate.reports.gate_files.page import Page, code, code_block
from lossgate.reports.gate_files.wording import in_words, remarks_of, short_name
from lossgate.reports.plain import one_line
from lossgate.reports.resource_lines import nearest_to_budgets

MARKER = "<!-- lossgate gate -->"
"""A hidden comment on the first line, by which a workflow finds its own comment again."""
_OF_A_KIND = 5
"""How many blockers of a kind are shown at once. The others can be unfolded."""
_LONGEST_MESSAGE = 500


def markdown(verdict: GateVerdict, *, limit: int = 65_000) -> str:
    """Returns the verdict as a comment on a pull request.

    Args:
        limit: the most characters. What does not fit is left out in whole items, and the comment
            says how many. (GitHub takes 65,536.)
    """
    page = Page(limit)
    page.must(f"## {in_words(verdict)} {MARKER}\n\n{_table(verdict)}\n")
    by_kind = {kind: [b for b in verdict.blockers if b.kind is kind] for kind in Kind}
    for kind, blockers in by_kind.items():
        page.section(_heading(kind, blockers), map(_item, blockers[:_OF_A_KIND]), _more(blockers))
    page.section(*_folded("Disagreements and how to see them again", map(_replay, _failing(verdict))))
    rest = chain.from_iterable(blockers[_OF_A_KIND:] for blockers in by_kind.values())
    page.section(*_folded("All other reasons", (f"- {b.kind}: {_item(b)[2:]}" for b in rest)))
    page.section(*_folded("Excused known failures", map(_excused, (c for c in verdict.cells if c.excused))))
    not_distinguished, exempt, excluded = remarks_of(verdict)
    page.section(*_folded("Choices of options that were not distinguished", _listed(not_distinguished)))
    page.section(*_folded("Properties to which candidates are not held, as they declare", _listed(exempt)))
    page.section(*_folded("Problems that candidates are not given, as they declare", _listed(excluded)))
    page.section(*_folded("Memory and traffic: the cell that comes nearest to each budget", _use(verdict)))
    page.section(*_folded("Policy, evidence and versions", _inputs(verdict)))
    return page.text()


def _table(verdict: GateVerdict) -> str:
    rows = Counter(cell.verdict for cell in verdict.cells)
    blocked = {blocker.cell for blocker in verdict.blockers}
    closing = Counter(cell.verdict for cell in verdict.cells if cell.key in blocked)
    excused = Counter(cell.verdict for cell in verdict.cells if cell.excused)
    lines = ["| verdict | cells | excused | keep the gate closed |", "|---|--:|--:|--:|"]
    lines += [f"| {name} | {rows[name]} | {excused[name]} | {closing[name]} |" for name in sorted(rows)]
    lines.append(f"| all | {rows.total()} | {excused.total()} | {closing.total()} |")
    return "\n".join(lines) + "\n"


def _heading(kind: Kind, blockers: Sequence[Blocker]) -> str:
    return f"\n### {kind} ({len(blockers)})\n\n{MEANINGS[kind].short} {MEANINGS[kind].way_out}\n\n"


def _more(blockers: Sequence[Blocker]) -> str:
    more = len(blockers) - _OF_A_KIND
    return f"- and {more} more like {'this' if len(blockers) == 1 else 'these'}\n" if more > 0 else ""


def _item(blocker: Blocker) -> str:
    cell = f"{code(str(blocker.cell))} " if blocker.cell is not None else ""
    where = f" ({code(blocker.where)})" if blocker.where else ""
    return f"- {cell}{code(one_line(blocker.message, _LONGEST_MESSAGE))}{where}\n"


def _folded(summary: str, items: Iterator[str]) -> tuple[str, Iterator[str], str]:
    return f"\n<details><summary>{summary}</summary>\n\n", items, "\n</details>\n"


def _failing(verdict: GateVerdict) -> Iterator[GatedCell]:
    blocked = {blocker.cell for blocker in verdict.blockers}
    return (c for c in verdict.cells if c.summary is not None and c.summary.failure is not None and c.key in blocked)


def _replay(cell: GatedCell) -> str:
    failure = cell.summary.failure if cell.summary is not None else None
    assert failure is not None
    findings = "".join(f"- {code(one_line(one, _LONGEST_MESSAGE))}\n" for one in failure.findings)
    problem = code(one_line(failure.description, _LONGEST_MESSAGE))
    replay = f"\n{code_block(failure.replay, 'sh')}" if failure.replay else ""
    return f"{code(str(cell.key))} on {problem}:\n\n{findings}{replay}\n"


def _excused(cell: GatedCell) -> str:
    return f"- {code(str(cell.key))}: {code(cell.excused)}\n"


def _listed(remarks: Sequence[str]) -> Iterator[str]:
    for line in remarks[1:]:
        yield f"- {code(one_line(line.strip(), _LONGEST_MESSAGE))}\n"


def _use(verdict: GateVerdict) -> Iterator[str]:
    summaries = (cell.summary for cell in verdict.cells if cell.summary is not None)
    for line in nearest_to_budgets((one.key.candidate, short_name(one.key), one.resources) for one in summaries):
        yield f"- {code(one_line(line, _LONGEST_MESSAGE))}\n"


def _inputs(verdict: GateVerdict) -> Iterator[str]:
    def digested(what: str, one: Digested) -> str:
        return f"- {what} {code(one.file)}, SHA-256 {code(one.sha256)}\n"

    yield digested("policy", verdict.policy)
    yield from (digested("evidence", one) for one in verdict.evidence)
    yield from (f"- commit {code(commit)}\n" for commit in verdict.commits)
    yield from (f"- {code(name)} {', '.join(map(code, verdict.versions[name]))}\n" for name in sorted(verdict.versions))
