# SPDX-License-Identifier: Apache-2.0
"""Says in one line what the evidence is of: commit, policy, versions and date."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lossgate.evidence.records import RunRecord
from lossgate.reports.page.entries import Entry
from lossgate.reports.page.page import Page

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
