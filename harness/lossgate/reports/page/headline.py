# SPDX-License-Identifier: Apache-2.0
"""The sentences and facts at the top of the page: the verdict, and the origin of the evidence."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lossgate.engine.cell_record import CellKey
from lossgate.evidence.records import RunRecord
from lossgate.gate.gate_verdict import Blocker, GateCode, GateReason, GateVerdict
from lossgate.reports.evidence_table import listed
from lossgate.reports.page.entries import Page, PageCell, State
from lossgate.reports.shown_verdict import NOTHING, broken_in_words, percent

UNKNOWN = "\N{EN DASH}"
"""Shown in place of the minimum detectable effect if a cell disagrees or was never compared."""


class Headline(NamedTuple):
    """The verdict in words."""

    verdict: str
    why: str
    good: bool


class PageProblem(NamedTuple):
    """A reason that keeps the gate closed, or a cell of a report that does not agree."""

    kind: str
    message: str
    where: str
    cell: int | None
    """The number of the entry of the cell; None if the reason is about no single cell."""


def detects(entry: PageCell) -> str:
    """Returns the minimum detectable effect of a cell in words."""
    if not entry.has_verdict:
        return "missing"
    effect = percent(entry.mde)
    if effect != NOTHING:
        return _plain_exponent(effect)
    disagrees = entry.state in (State.DISAGREES, State.BROKEN, State.KNOWN)
    return UNKNOWN if disagrees or not entry.comparisons else NOTHING


def _plain_exponent(number: str) -> str:
    """Writes ``3.9e-07`` as ``3.9e-7``."""
    digits, e, exponent = number.partition("e")
    return f"{digits}e{int(exponent)}" if e else digits


def headline(gate: GateVerdict | None, entries: Sequence[PageCell]) -> Headline:
    """Returns the verdict of a gate, or without a gate, the verdict on all cells together."""
    return _of_report(entries) if gate is None else _of_gate(gate)


def _of_gate(gate: GateVerdict) -> Headline:
    required = sum(cell.required for cell in gate.cells)
    if gate.code is GateCode.OPEN:
        passing = "the one required cell passes" if required == 1 else f"all {required:,} required cells pass"
        return Headline("The gate is open.", f"Exit code 0: {passing}.", good=True)
    others = Counter(blocker.reason for blocker in gate.blockers if not blocker.reason.is_of_kernel)
    counts = ", ".join(f"{others[reason]:,} {reason}" for reason in GateReason if others[reason])
    if gate.code is not GateCode.DISAGREE:
        why = f"Exit code 3: no cell disagrees, but the evidence is not enough: {counts}."
        return Headline("The gate is closed.", why, good=False)
    wrong = {reason: len({one.cell for one in gate.blockers if one.reason is reason}) for reason in GateReason}
    disagree, broken = wrong[GateReason.DISAGREE], wrong[GateReason.PROMISE_BROKEN]
    said = [f"{_count(disagree, 'cell')} {'disagrees' if disagree == 1 else 'disagree'}"] if disagree else []
    said += [f"{_count(broken, 'cell')} {_BREAK[broken == 1]}"] if broken else []
    why = f"Exit code 1: {' and '.join(said)}"
    if number := others.total():
        are = "is" if number == 1 else "are"
        why += f", and there {are} {_count(number, 'other reason')}: {counts}"
    return Headline("The gate is closed.", f"{why}.", good=False)


_BREAK = ("break promises", "breaks promises")
"""What is said of several cells, and of one."""


def _of_report(entries: Sequence[PageCell]) -> Headline:
    wrong = sum(entry.state is State.DISAGREES for entry in entries)
    breaking = [entry for entry in entries if entry.state is State.BROKEN]
    break_promises = f"{_share(len(breaking), entries)} {_BREAK[len(breaking) == 1]}"
    unsure = sum(entry.state is State.INCONCLUSIVE for entry in entries)
    if not entries:
        return Headline("There are no cells.", "The evidence has no results.", good=False)
    if wrong:
        disagree = "disagrees" if wrong == 1 else "disagree"
        return Headline(f"{_share(wrong, entries)} {disagree}.", f"{break_promises}." if breaking else "", good=False)
    if breaking:
        which = broken_in_words(entry.source for entry in breaking if entry.source is not None)
        return Headline(f"{break_promises}.", f"{which[:1].upper()}{which[1:]}.", good=False)
    if unsure:
        are = "is" if unsure == 1 else "are"
        why = "Nothing wrong was seen, but not enough was seen."
        return Headline(f"{_share(unsure, entries)} {are} inconclusive.", why, good=False)
    if any(entry.state is State.KNOWN for entry in entries):
        return Headline("No cell disagrees.", "Only known failures do.", good=True)
    all_agree = "The one cell agrees." if len(entries) == 1 else f"All {len(entries):,} cells agree."
    return Headline(all_agree, "", good=True)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _share(number: int, entries: Sequence[PageCell]) -> str:
    return f"{number:,} of {_count(len(entries), 'cell')}"


def problems_of(gate: GateVerdict | None, entries: Sequence[PageCell]) -> list[PageProblem]:
    """Returns the reasons that keep the gate closed, or without a gate, the cells to look at."""
    numbers = {entry.key: number for number, entry in enumerate(entries)}
    if gate is not None:
        return [_blocking(blocker, numbers) for blocker in gate.blockers]
    return [
        PageProblem(entry.state, entry.reasons[0] if entry.reasons else "", "", number)
        for number, entry in enumerate(entries)
        if entry.needs_attention
    ]


def _blocking(blocker: Blocker, numbers: dict[CellKey, int]) -> PageProblem:
    cell = None if blocker.cell is None else numbers.get(blocker.cell)
    return PageProblem(blocker.reason, blocker.sentence, blocker.where, cell)


_VERSIONS = ("lossgate", "torch", "python")


class Fact(NamedTuple):
    """A name and a value, such as ``commit`` and its digits."""

    name: str
    value: str


def origin_of(page: Page, entries: Sequence[PageCell]) -> list[Fact]:
    """Returns the facts in the line at the top of the page. They leave out earlier runs."""
    runs = _current_runs(page, entries)
    return [*_commit(page, runs), *_policy(page), *_versions(page, runs), *_date(entries)]


def _current_runs(page: Page, entries: Sequence[PageCell]) -> list[RunRecord]:
    named = {entry.source.run for entry in entries if entry.source is not None}
    return [run for run in page.runs if run.run in named]


def _commit(page: Page, runs: Sequence[RunRecord]) -> Iterator[Fact]:
    found = page.gate.commits if page.gate is not None else [run.commit for run in runs if run.commit]
    modified = ", with files that differ from it" if any(run.modified for run in runs) else ""
    commits = sorted({commit[:12] for commit in found})
    if commits:
        yield Fact(_name("commit", commits), f"{listed(commits)}{modified}")
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
            yield Fact(name, listed(found))


def _date(entries: Sequence[PageCell]) -> Iterator[Fact]:
    days = sorted({entry.source.time[:10] for entry in entries if entry.source is not None})
    if days:
        yield Fact("evidence of", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")


def _name(one: str, found: Sequence[str]) -> str:
    return one if len(found) == 1 else f"{one}s"
