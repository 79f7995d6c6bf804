# SPDX-License-Identifier: Apache-2.0
"""``lossgate gate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lossgate.cli.app import Exit, app, say

if TYPE_CHECKING:
    from lossgate.evidence.gather import Gathered
    from lossgate.evidence.reader import Digested
    from lossgate.gate.verdict import GateVerdict
    from lossgate.reports.kept_records import KeptRecords

    Text = Callable[[], str]


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
    """Hold evidence to a policy: exit code 0 if the gate is open, 1 if a cell disagrees, 3 if it is
    closed for another reason.

    Args:
        evidence: Files that verify --evidence has written, or folders of them (*.jsonl).
        policy: What a release needs.
        init: Write a first policy from the evidence, instead of holding it to one.
        commit: The commit that is to be released. All evidence must be of it.
        now: The time from which the age of evidence counts, as 2026-01-31T12:00:00Z. By default the
            time on the clock.
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
    from lossgate.errors import UsageError

    if not evidence:
        raise UsageError("gate: no evidence named; expected files that lossgate verify --evidence wrote, or folders")
    if init:
        return _init(evidence, policy)
    from lossgate.evidence.gather import gather
    from lossgate.gate.decide import decide
    from lossgate.gate.policy import load_policy
    from lossgate.reports.console import make_console
    from lossgate.reports.gate_text import print_gate
    from lossgate.reports.kept_records import KeptRecords

    rules = load_policy(policy)
    time = _time(now)
    subjects = [_digested(file) for file in subject or ()]
    kept = KeptRecords()
    gathered = gather(evidence, kept.keep if html is not None else None)
    verdict = decide(gathered, rules, time, commit)
    print_gate(verdict, make_console())
    files = {"junit": junit, "sarif": sarif, "markdown": markdown, "statement": statement, "html": html}
    texts = _texts(verdict, files, subjects)
    if html is not None:
        texts["html"] = lambda: _page(verdict, gathered, kept, history or ())
    return _write(files, texts, Exit(verdict.code))


def _init(evidence: Sequence[Path], policy: Path) -> int:
    """Writes a first policy."""
    from lossgate.errors import UsageError
    from lossgate.evidence.gather import gather
    from lossgate.gate.init_policy import first_policy

    if policy.exists():
        raise UsageError(f"gate --init: {policy} is there already; name another file with --policy, or remove it")
    gathered = gather(evidence)
    text = first_policy(gathered.newest.values(), gathered.runs.values(), _examples(policy))
    try:
        with policy.open("x") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--policy {policy}: can't be written: {error.strerror}") from None
    print(f"wrote {policy}, which asks for the {len(gathered.cells)} cells of the evidence")
    return Exit.AGREE


_LARGEST_EXAMPLE = 1 << 20
"""Files that are larger are no failure files: those are a few kilobytes."""


def _examples(policy: Path) -> dict[str, Path]:
    """Returns the JSON files below the working folder by their SHA-256, as the policy would name
    them.
    """
    import os
    from hashlib import sha256

    folder = policy.resolve().parent
    found: dict[str, Path] = {}
    for inside, folders, files in os.walk("."):
        folders[:] = sorted(name for name in folders if name == ".lossgate" or not name.startswith("."))
        for name in sorted(files):
            file = Path(inside, name)
            if file.suffix == ".json" and file.is_file() and file.stat().st_size <= _LARGEST_EXAMPLE:
                found[sha256(file.read_bytes()).hexdigest()] = Path(os.path.relpath(file, folder))
    return found


def _time(now: str | None) -> datetime:
    from lossgate.errors import UsageError

    if now is None:
        return datetime.now(UTC)
    try:
        time = datetime.fromisoformat(now)
    except ValueError:
        raise UsageError(f"--now {now}: expected a time such as 2026-01-31T12:00:00Z") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _digested(file: Path) -> Digested:
    """Returns a file that is released, with its digest."""
    from hashlib import file_digest

    from lossgate.errors import UsageError
    from lossgate.evidence.reader import Digested

    try:
        with file.open("rb") as stream:
            return Digested(file=str(file), sha256=file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise UsageError(f"--subject {file}: can't be read: {error.strerror}") from None


def _texts(verdict: GateVerdict, files: Mapping[str, Path | None], subjects: Sequence[Digested]) -> dict[str, Text]:
    """Returns how to make the text of each file that is asked for."""
    from lossgate.reports.gate_files.junit import junit_xml
    from lossgate.reports.gate_files.markdown import markdown
    from lossgate.reports.gate_files.sarif import sarif
    from lossgate.reports.gate_files.statement import statement

    makers: dict[str, Text] = {
        "junit": lambda: junit_xml(verdict),
        "sarif": lambda: sarif(verdict),
        "markdown": lambda: markdown(verdict),
        "statement": lambda: statement(verdict, subjects),
    }
    return {name: makers[name] for name, file in files.items() if file is not None and name in makers}


def _page(verdict: GateVerdict, gathered: Gathered, kept: KeptRecords, history: Sequence[Path]) -> str:
    from lossgate.evidence.gather import gather
    from lossgate.reports.page.page import Page
    from lossgate.reports.page.render import render_page

    earlier = KeptRecords()
    if history:
        gather(history, earlier.keep)
    page = Page(
        title="Release gate",
        cells=list(kept.newest().values()),
        gate=verdict,
        history=earlier.by_cell(),
        runs=list(gathered.runs.values()),
    )
    return render_page(page)


def _write(files: Mapping[str, Path | None], texts: Mapping[str, Text], code: Exit) -> int:
    """Writes the files. One that can't be written is told, and the others are written all the same.

    Returns:
        The exit code: that of the verdict, or that of wrong use if a file could not be written and
        nothing disagrees.
    """
    from lossgate.errors import UsageError
    from lossgate.reports.written import write_file

    for name, make in texts.items():
        file = files[name]
        assert file is not None
        try:
            write_file(file, make(), option=f"--{name}")
        except UsageError as error:
            say(str(error))
            code = code if code is Exit.DISAGREE else Exit.USAGE
    return code
