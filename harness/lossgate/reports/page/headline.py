# SPDX-License-Identifier: Apache-2.0
"""The sentences and numbers at the top of the page: the verdict, and of what the evidence is."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lossgate.engine.cell_record import CellKey
from lossgate.evidence.records import RunRecord
from lossgate.gate.gate_verdict import Blocker, GateCode, GateReason, GateVerdict
from lossgate.reports.page.entries import Entry, Page, State

UNKNOWN, NOTHING = "\N{EN DASH}", "nothing"
"""The minimum detectable effect of a cell that disagrees or was never compared, and of one that
would not even have seen an error of 100%."""


class Headline(NamedTuple):
    """The verdict in words."""

    verdict: str
    why: str
    good: bool


class Problem(NamedTuple):
    """A line of what keeps the gate closed, or of what a reader of a report should look at."""

    kind: str
    message: str
    where: str
    cell: int | None
    """The number of its entry."""


def detects(entry: Entry) -> str:
    """Returns the minimum detectable effect of a cell, as the terminal writes it."""
    if not entry.has_verdict:
        return "missing"
    if entry.mde is None or entry.mde > 1:
        disagrees = entry.state in (State.DISAGREES, State.KNOWN)
        return UNKNOWN if disagrees or not entry.comparisons else NOTHING
    if entry.mde < 1e-4:
        return _plain_exponent(f"{entry.mde:.2g}")
    return f"{float(f'{100 * entry.mde:.2g}'):g}%"


def _plain_exponent(number: str) -> str:
    """Writes ``3.9e-07`` as ``3.9e-7``."""
    digits, e, exponent = number.partition("e")
    return f"{digits}e{int(exponent)}" if e else digits


def headline(gate: GateVerdict | None, entries: Sequence[Entry]) -> Headline:
    """Returns the verdict of a gate, or without one what the cells say together."""
    return _of_report(entries) if gate is None else _of_gate(gate)


def _of_gate(gate: GateVerdict) -> Headline:
    required = sum(cell.required for cell in gate.cells)
    if gate.code is GateCode.OPEN:
        passing = "the one required cell passes" if required == 1 else f"all {required:,} required cells pass"
        return Headline("The gate is open.", f"Exit code 0: {passing}.", good=True)
    if gate.code is GateCode.DISAGREE:
        wrong = len({blocker.cell for blocker in gate.blockers if blocker.reason is GateReason.DISAGREE})
        why = f"Exit code 1: {_count(wrong, 'cell')} {'disagrees' if wrong == 1 else 'disagree'}"
        others = _by_kind(gate)
        if number := others.total():
            why += f", and there {'is' if number == 1 else 'are'} {_count(number, 'other reason')}: {_counts(others)}"
        return Headline("The gate is closed.", f"{why}.", good=False)
    why = f"Exit code 3: no cell disagrees, but the evidence is not enough: {_counts(_by_kind(gate))}."
    return Headline("The gate is closed.", why, good=False)


def _by_kind(gate: GateVerdict) -> Counter[GateReason]:
    """Counts the reasons other than disagreements."""
    return Counter(blocker.reason for blocker in gate.blockers if blocker.reason is not GateReason.DISAGREE)


def _counts(kinds: Counter[GateReason]) -> str:
    return ", ".join(f"{kinds[kind]:,} {kind}" for kind in GateReason if kinds[kind])


def _of_report(entries: Sequence[Entry]) -> Headline:
    wrong = sum(entry.state is State.DISAGREES for entry in entries)
    unsure = sum(entry.state is State.INCONCLUSIVE for entry in entries)
    if not entries:
        return Headline("There are no cells.", "The evidence has no results.", good=False)
    if wrong:
        return Headline(f"{_share(wrong, entries)} {'disagrees' if wrong == 1 else 'disagree'}.", "", good=False)
    if unsure:
        why = "Nothing wrong was seen, but not enough was seen."
        return Headline(f"{_share(unsure, entries)} {'is' if unsure == 1 else 'are'} inconclusive.", why, good=False)
    if any(entry.state is State.KNOWN for entry in entries):
        return Headline("No cell disagrees.", "Only known failures do.", good=True)
    return Headline(
        "The one cell agrees." if len(entries) == 1 else f"All {len(entries):,} cells agree.", "", good=True
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _share(number: int, entries: Sequence[Entry]) -> str:
    return f"{number:,} of {_count(len(entries), 'cell')}"


def problems_of(gate: GateVerdict | None, entries: Sequence[Entry]) -> list[Problem]:
    """Returns what keeps the gate closed, or without a gate what does not agree."""
    numbers = {entry.key: number for number, entry in enumerate(entries)}
    if gate is not None:
        return [_blocking(blocker, numbers) for blocker in gate.blockers]
    return [
        Problem(entry.state, entry.reasons[0] if entry.reasons else "", "", number)
        for number, entry in enumerate(entries)
        if entry.needs_attention
    ]


def _blocking(blocker: Blocker, numbers: dict[CellKey, int]) -> Problem:
    cell = None if blocker.cell is None else numbers.get(blocker.cell)
    return Problem(blocker.reason, blocker.sentence, blocker.where, cell)


_VERSIONS = ("lossgate", "torch", "python")
_SHOWN = 3
"""Values of one fact; more would not fit into the line."""


class Fact(NamedTuple):
    """A name and what it is, such as ``commit`` and the digits of it."""

    name: str
    value: str


def origin_of(page: Page, entries: Sequence[Entry]) -> list[Fact]:
    """Returns the facts of the line at the top of the page. Runs of history do not count."""
    runs = _current_runs(page, entries)
    return [*_commit(page, runs), *_policy(page), *_versions(page, runs), *_date(entries)]


def _current_runs(page: Page, entries: Sequence[Entry]) -> list[RunRecord]:
    sources = [entry.record or (entry.gated and entry.gated.summary) for entry in entries]
    named = {source.run for source in sources if source}
    return [run for run in page.runs if run.run in named]


def _commit(page: Page, runs: Sequence[RunRecord]) -> Iterator[Fact]:
    found = page.gate.commits if page.gate is not None else [run.commit for run in runs if run.commit]
    modified = ", with files that differ from it" if any(run.modified for run in runs) else ""
    commits = sorted({commit[:12] for commit in found})
    if commits:
        yield Fact(_name("commit", commits), f"{_listed(commits)}{modified}")
    elif runs:
        yield Fact("commit", "unknown")


def _policy(page: Page) -> Iterator[Fact]:
    if page.gate is not None:
        yield Fact("policy", f"{page.gate.policy.file} {page.gate.policy.sha256[:12]}")


def _versions(page: Page, runs: Sequence[RunRecord]) -> Iterator[Fact]:
    versions: Mapping[str, Sequence[str]]
    if page.gate is not None:
        versions = page.gate.versions
    else:
        versions = {name: [run.versions[name] for run in runs if name in run.versions] for name in _VERSIONS}
    for name in _VERSIONS:
        if found := sorted(set(versions.get(name, ()))):
            yield Fact(name, _listed(found))


def _date(entries: Sequence[Entry]) -> Iterator[Fact]:
    sources = [entry.record or (entry.gated and entry.gated.summary) for entry in entries]
    days = sorted({source.time[:10] for source in sources if source})
    if days:
        yield Fact("evidence of", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")


def _name(one: str, found: Sequence[str]) -> str:
    return one if len(found) == 1 else f"{one}s"


def _listed(found: Sequence[str]) -> str:
    more = len(found) - _SHOWN
    return ", ".join(found[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
