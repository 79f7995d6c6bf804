# SPDX-License-Identifier: Apache-2.0
"""``lossgate gate``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lossgate.cli.app import Exit, Text, app, check_outputs, write_outputs

if TYPE_CHECKING:
    from lossgate.evidence.gather import KeptRecords
    from lossgate.evidence.reader import Digested
    from lossgate.evidence.records import RunRecord
    from lossgate.gate.gate_verdict import GateVerdict


_LARGEST_EXAMPLE = 1 << 20
"""Bytes of the largest file that may be a failure file. Failure files have a few kilobytes."""


@app.command
def gate(
    *evidence: Path,
    policy: Path = Path("gate.toml"),
    init: Annotated[bool, Parameter(negative=())] = False,
    commit: str | None = None,
    now: str | None = None,
    junit: Path | None = None,
    sarif: Path | None = None,
    markdown: Path | None = None,
    statement: Path | None = None,
    subject: Annotated[list[Path] | None, Parameter(negative=())] = None,
    html: Path | None = None,
    history: Annotated[list[Path] | None, Parameter(negative=())] = None,
) -> int:
    """Hold evidence to a policy: exit code 0 if the gate is open, 1 if a kernel is wrong, 3 if the
    gate is closed for another reason.

    Args:
        evidence: Files that verify --evidence has written, or folders of them (*.jsonl).
        policy: The policy, which says what a release needs.
        init: Write a first policy from the evidence, instead of holding it to one.
        commit: The whole hash of the commit that is to be released. All evidence must be of it.
        now: The time from which the age of evidence counts, such as 2026-01-31T12:00:00Z. By
            default the time on the clock.
        junit: Write JUnit XML to this file.
        sarif: Write SARIF to this file.
        markdown: Write Markdown for a pull request to this file.
        statement: Write an in-toto statement to this file, which names policy, evidence and
            subjects by digest.
        subject: A file that is released, for the statement; may be repeated. By default the commit
            and the source files of the candidates.
        html: Write a page to this file.
        history: Evidence of earlier runs, for the page; may be repeated.
    """
    from lossgate.base.errors import UsageError

    if not evidence:
        raise UsageError("gate: no evidence named; expected files that lossgate verify --evidence wrote, or folders")
    files = {"junit": junit, "sarif": sarif, "markdown": markdown, "statement": statement, "html": html}
    if init:
        others = {**files, "commit": commit, "now": now, "subject": subject, "history": history}
        if refused := sorted(name for name, value in others.items() if value):
            raise UsageError(f"gate: --init writes a policy and judges nothing; leave --{refused[0]} out")
        return _write_first_policy(evidence, policy)
    if subject and statement is None:
        raise UsageError("gate: --subject needs --statement, the only file that names subjects; add it to the command")
    if history and html is None:
        raise UsageError("gate: --history needs --html, the only file that shows history; add it to the command")
    from lossgate.evidence.gather import KeptRecords, files_in, gather
    from lossgate.gate.decide import decide
    from lossgate.gate.policy import load_policy
    from lossgate.reports.console import make_console
    from lossgate.reports.gate_text import print_gate

    check_outputs(files, [policy, *files_in(evidence), *files_in(history or ()), *(subject or ())])
    rules, time = load_policy(policy), _time(now)
    subjects = [_digested(file) for file in subject or ()]
    kept, earlier = KeptRecords(), KeptRecords()
    gathered = gather(evidence, kept.keep if html is not None else None)
    runs = gathered.runs
    if history:
        runs = gather(history, earlier.keep).runs | runs
    verdict = decide(gathered, rules, time, _whole_commit(commit))
    closed_pipe = False
    try:
        print_gate(verdict, make_console())
    except BrokenPipeError:  # nobody reads the output, but the files must be written
        closed_pipe = True
    texts = _texts(verdict, subjects, lambda: _page(verdict, runs.values(), kept, earlier))
    code = write_outputs({name: (file, texts[name]) for name, file in files.items() if file}, Exit(verdict.code))
    if closed_pipe:
        raise BrokenPipeError
    return code


def _write_first_policy(evidence: Sequence[Path], policy: Path) -> Exit:
    """Writes a policy that asks for the cells of evidence, and prints what is left to do.

    Raises:
        UsageError: if the file exists already, or if it cannot be written.
    """
    from lossgate.base.errors import UsageError
    from lossgate.evidence.gather import gather
    from lossgate.gate.init_policy import first_policy

    if policy.exists():
        raise UsageError(f"gate --init: {policy} exists already; name another file with --policy, or remove it")
    gathered = gather(evidence)
    newest = gathered.newest.values()
    results = [result for of_cell in gathered.cells.values() for result in of_cell]
    text = first_policy(results, gathered.runs.values(), _examples(policy))
    try:
        with policy.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--policy {policy}: can't be written: {error.strerror}") from None
    count = "the one cell" if len(newest) == 1 else f"the {len(newest)} cells"
    print(f"wrote {policy}, which asks for {count} of the evidence")
    if any(cell.known_failure is not None for cell in newest):
        print("fill in issue, owner and expires of each known failure before you use it")
    if failing := len([cell for cell in newest if cell.verdict != "AGREE" and not cell.expected]):
        print(f"the gate is closed now: {failing} of them {'does' if failing == 1 else 'do'} not agree")
    if useless := len(gathered.damaged) + len(gathered.contradictory):
        print(f"the gate is closed now: {useless} lines are no evidence")
    return Exit.AGREE


def _examples(policy: Path) -> dict[str, Path]:
    """Returns the JSON files below the working folder by SHA-256. Paths are relative to the policy,
    which may name the files as examples of known failures.
    """
    folder = policy.resolve().parent
    found: dict[str, Path] = {}
    for inside, folders, files in os.walk("."):
        # Hidden folders are left out: os.walk visits only the folders that stay in the list.
        folders[:] = sorted(name for name in folders if name == ".lossgate" or not name.startswith("."))
        for name in sorted(files):
            file = Path(inside, name)
            with suppress(OSError):  # a file that can't be read is no example
                if file.suffix == ".json" and file.is_file() and file.stat().st_size <= _LARGEST_EXAMPLE:
                    found[sha256(file.read_bytes()).hexdigest()] = Path(os.path.relpath(file, folder))
    return found


def _whole_commit(commit: str | None) -> str | None:
    """Checks that a commit is given by its whole hash, as evidence has it.

    Raises:
        UsageError: if it is shortened, or if it is the name of a branch.
    """
    from lossgate.base.errors import UsageError

    if commit is not None and not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", commit):
        raise UsageError(
            f'--commit {commit}: expected the whole hash of a commit; write --commit "$(git rev-parse HEAD)"'
        )
    return commit


def _time(now: str | None) -> datetime:
    from lossgate.base.errors import UsageError

    if now is None:
        return datetime.now(UTC)
    try:
        time = datetime.fromisoformat(now)
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UsageError(f"--now {now}: expected a time such as 2026-01-31T12:00:00Z") from None


def _digested(file: Path) -> Digested:
    """Returns a released file with its digest."""
    from lossgate.base.errors import UsageError
    from lossgate.evidence.reader import Digested

    try:
        with file.open("rb") as stream:
            return Digested(file=str(file), sha256=file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise UsageError(f"--subject {file}: can't be read: {error.strerror}") from None


def _texts(verdict: GateVerdict, subjects: Sequence[Digested], page: Text) -> dict[str, Text]:
    """Returns a function for each output file that makes its text."""
    from lossgate.reports.gate_files.junit import junit_xml
    from lossgate.reports.gate_files.markdown import markdown
    from lossgate.reports.gate_files.sarif import sarif
    from lossgate.reports.gate_files.statement import statement

    return {
        "junit": lambda: junit_xml(verdict),
        "sarif": lambda: sarif(verdict, root=Path.cwd()),
        "markdown": lambda: markdown(verdict),
        "statement": lambda: statement(verdict, subjects),
        "html": page,
    }


def _page(verdict: GateVerdict, runs: Iterable[RunRecord], kept: KeptRecords, earlier: KeptRecords) -> str:
    from lossgate.reports.page.entries import Page
    from lossgate.reports.page.render import render_page

    page = Page(
        title="Release gate",
        cells=list(kept.newest().values()),
        gate=verdict,
        history=earlier.by_cell(),
        runs=list(runs),
    )
    return render_page(page)
