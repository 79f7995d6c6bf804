# SPDX-License-Identifier: Apache-2.0
"""``lossgate verify``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from lossgate.base.own_process import ended_by_signals
from lossgate.base.spelling import in_a_row
from lossgate.cli.app import Exit, Number, Whole, app, check_outputs, driven, load, say, write_outputs

if TYPE_CHECKING:
    from lossgate.base.errors import UsageError
    from lossgate.declaration.candidate import Candidate
    from lossgate.engine.cell import CellResult
    from lossgate.engine.events import Event
    from lossgate.engine.matrix import Shard
    from lossgate.engine.plan import Selection
    from lossgate.engine.settings import Settings
    from lossgate.evidence.writer import EvidenceFile
    from lossgate.reports.json_file import ForPrograms
    from lossgate.reports.terminal import Terminal, Volume


@app.command
def verify(
    *targets: str,
    layout: Annotated[list[str] | None, Parameter(negative=())] = None,
    dtype: Annotated[list[str] | None, Parameter(negative=())] = None,
    size: Annotated[list[str] | None, Parameter(negative=())] = None,
    property: Annotated[list[str] | None, Parameter(negative=())] = None,
    only: Annotated[list[str] | None, Parameter(negative=())] = None,
    keyword: Annotated[str | None, Parameter(name=["-k", "--keyword"])] = None,
    fail_fast: Annotated[bool, Parameter(name=["-x", "--fail-fast"], negative=())] = False,
    numbers_only: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(name=["-q", "--quiet"], negative=())] = False,
    verbose: Annotated[bool, Parameter(name=["-v", "--verbose"], negative=())] = False,
    no_cache: Annotated[bool, Parameter(negative=())] = False,
    profile: str | None = None,
    quick: Annotated[bool, Parameter(negative=())] = False,
    changed: Annotated[bool, Parameter(negative=())] = False,
    examples: Whole = None,
    ranks: Whole = None,
    matrix: str | None = None,
    world: str | None = None,
    device: str | None = None,
    seed: Whole = None,
    timeout: Number = None,
    jobs: Whole = None,
    evidence: Path | None = None,
    json: Path | None = None,
    failures: Path = Path(".lossgate"),
    shard: str | None = None,
) -> int:
    """Judge candidates against the references of their specs, on ranks.

    Args:
        targets: Files (file.py), modules (package.module), or one candidate of either
            (file.py:name).
        layout: A layout, such as tp=2,cp=2 or single; may be repeated. By default a few layouts
            of at most --ranks ranks that cover what differs; see --matrix.
        dtype: float32, bfloat16 or float16; may be repeated. By default all that a candidate takes.
        size: Also try a problem of this size in each cell: tokens, width of the hidden states, and
            vocabulary, such as 4096x1024x32768, which takes minutes; may be repeated.
        property: A property, such as agreement or frozen-inputs; may be repeated. By default all
            that apply; lossgate list shows them. If agreement is not among them, each property has
            cells of its own, and is checked on all problems.
        only: Verify only the candidate with this name; may be repeated.
        keyword: Verify only the cells whose names match an expression like those of pytest:
            'bfloat16 and not dp'. An example of a name is my_kernel[agreement-cp=2-float32].
        fail_fast: Stop after the first cell that disagrees or breaks a promise.
        numbers_only: Let a cell pass if its numbers agree, although it breaks promises: properties
            other than agreement. They are told all the same.
        quiet: Show only the cells that do not pass, and the summary.
        verbose: Show every cell, all disagreements in full, all output of kernels, and how much
            work the run took.
        no_cache: Draw all problems anew, and find out anew which mistakes they show. Nothing is
            read from the cache or from the decks that come with lossgate, and nothing is kept.
        profile: dev (the default), quick, ci, nightly, release, or one of
            [tool.lossgate.profiles] in pyproject.toml.
        quick: The same as --profile quick: one rank and one layout that splits most axes, in one
            dtype. What it leaves out, it leaves unseen.
        changed: The targets are files that changed, of any kind. Pass over those without a
            candidate, instead of refusing them. Only files that mention lossgate are imported.
        examples: Problems for each cell. A cell is one candidate, layout and dtype.
        ranks: Ranks of the largest layout.
        matrix: covering (the default of dev and ci), or full for every layout of at most --ranks
            ranks in every dtype.
        world: Where ranks run: simulated (all in one process, the default), gloo or nccl (one
            process each), or torchrun (the processes that torchrun has launched).
        device: Where ranks compute: cpu (the default) or cuda.
        seed: Another seed draws other problems.
        timeout: Seconds that a rank may take until its next collective or, if it is a process,
            until it returns. After that it counts as hanging.
        jobs: Processes side by side; 0 for one on each core.
        evidence: Append evidence for lossgate gate to this file: a JSON line for each cell.
        json: Write the verdict, and the verdict, cause, remedy and replay command of each cell, to
            this file. It is gone if the run ends without a verdict.
        failures: Folder for failure files.
        shard: Verify one of several even parts of the matrix, such as 3/8. The parts are the same
            on every machine.
    """
    from lossgate.adequacy.store import ANEW, FOLDER
    from lossgate.base.errors import UsageError

    if not targets:
        raise UsageError("verify: nothing named; expected files or modules with candidates, such as my_kernels.py")
    if quick and profile is not None:
        raise UsageError(f"--quick and --profile {profile}: expected one of them; --quick is --profile quick")
    if json is not None:
        check_outputs({"json": json}, [*map(Path, targets), *([] if evidence is None else [evidence])])
        if json.is_file():
            json.unlink()
    if no_cache:
        os.environ[FOLDER], os.environ[ANEW] = "", "yes"  # before load: workers inherit the environment
    load()
    if changed and not (targets := _with_candidates(targets)):
        return Exit.AGREE

    from lossgate.engine.matrix import Shard
    from lossgate.engine.plan import Selection
    from lossgate.engine.settings import load_settings

    given = {"layouts": layout, "dtypes": dtype, "sizes": size, "properties": property}
    lists: dict[str, Any] = {name: tuple(values) if values else None for name, values in given.items()}
    settings = load_settings(
        "quick" if quick else "dev" if profile is None else profile,
        examples=examples,
        ranks=ranks,
        matrix=matrix,
        world=world,
        device=device,
        seed=seed,
        timeout=timeout,
        jobs=jobs,
        numbers_only=numbers_only or None,
        **lists,
    )
    wanted = _Wanted(
        targets=targets,
        only=tuple(only or ()),
        settings=settings,
        shard=Shard.parse(shard) if shard is not None else None,
        selection=Selection(keyword) if keyword is not None else None,
        fail_fast=fail_fast,
        failures=failures,
        volume=_volume(quiet, verbose),
    )
    return driven(settings.world, lambda: _verify(wanted, evidence, json))


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The options of the command, checked and converted."""

    targets: Sequence[str]
    only: Sequence[str]
    settings: Settings
    shard: Shard | None
    selection: Selection | None
    fail_fast: bool
    failures: Path
    volume: Volume


def _volume(quiet: bool, verbose: bool) -> Volume:
    from lossgate.base.errors import UsageError
    from lossgate.reports.terminal import Volume

    if quiet and verbose:
        raise UsageError("-q and -v: expected one of them; -q shows less than by default, and -v more")
    if quiet:
        return Volume.QUIET
    return Volume.VERBOSE if verbose else Volume.NORMAL


def _with_candidates(targets: Sequence[str]) -> tuple[str, ...]:
    """Returns the targets that hold candidates, and tells of the others.

    A file that doesn't mention lossgate is not imported: it may be a script.
    """
    from lossgate.declaration.candidate import Candidate
    from lossgate.declaration.modules import kept_in, load_module, made_in

    def has_one(file: Path) -> bool:
        if file.suffix != ".py" or b"lossgate" not in file.read_bytes():
            return False
        module = load_module(str(file), here=False)
        return bool(made_in(module)) or any(isinstance(one, Candidate) for one in kept_in(module))

    found = tuple(target for target in targets if not Path(target).is_file() or has_one(Path(target)))
    if others := [target for target in targets if target not in found]:
        rest = "" if found else ", so nothing is verified"
        say(f"no candidate in {in_a_row(others)}{rest}")
    return found


def _verify(wanted: _Wanted, evidence: Path | None, json: Path | None) -> int:
    """Verifies until all is done or a signal stops it. Returns the exit code."""
    tally = _Tally(evidence, numbers_only=wanted.settings.numbers_only)
    with ended_by_signals(tally.stop):
        _run(wanted, tally)
    told, verdict, code = tally.told, tally.verdict.name, tally.code
    return code if json is None or told is None else write_outputs({"json": (json, lambda: told.text(verdict))}, code)


class _Tally:
    """Counts cells, and finds the exit code."""

    def __init__(self, evidence: Path | None, *, numbers_only: bool = False) -> None:
        self._numbers_only = numbers_only
        self.verdict, self.is_short = Exit.AGREE, False
        self.terminal: Terminal | None = None
        self.file: EvidenceFile | None = None
        self.evidence, self._cells, self._done = evidence, 0, 0
        self.told: ForPrograms | None = None

    @property
    def code(self) -> Exit:
        """The exit code. A run does not succeed that could not write its evidence, or had to leave
        out what was named.
        """
        is_short = self.is_short or (self.file is not None and self.file.error is not None)
        return Exit.USAGE if is_short and self.verdict is not Exit.DISAGREE else self.verdict

    def __call__(self, event: Event) -> None:
        from lossgate.engine.events import CellFinished, RunFinished, RunStarted

        if isinstance(event, RunStarted):
            self._cells = len(event.cells)
        elif isinstance(event, CellFinished):
            self._done += 1
        elif isinstance(event, RunFinished):
            self.verdict = exit_code(event.results, numbers_only=self._numbers_only)
            if event.stopped and self.verdict is Exit.AGREE:
                self.verdict = Exit.INCONCLUSIVE

    def stop(self, signal: str) -> None:
        """Prints how far the run came before a signal stopped it."""
        if self.terminal is not None:
            self.terminal.close()
        has_evidence = self.file is not None and self.file.error is None and self._done
        kept = f"; their evidence is in {self.evidence}" if has_evidence else ""
        print(f"lossgate: stopped by {signal} after {self._done} of {self._cells} cells{kept}", file=sys.stderr)


def _run(wanted: _Wanted, tally: _Tally) -> None:
    from lossgate.declaration.loading import load_all_candidates
    from lossgate.engine.events import Consumer
    from lossgate.engine.run import run
    from lossgate.evidence.writer import EvidenceFile
    from lossgate.reports.failures import FailureFiles
    from lossgate.reports.json_file import ForPrograms
    from lossgate.reports.terminal import Terminal

    with ExitStack() as stack:
        candidates = _chosen(load_all_candidates(_available(wanted.targets, tally)), wanted.only)
        failure_files = FailureFiles(wanted.failures, say)
        tally.told = ForPrograms(failure_files.replay)
        consumers: list[Consumer] = [failure_files, tally, tally.told]
        if tally.evidence is not None:
            tally.file = EvidenceFile(tally.evidence, say, failure_files.replay)
            consumers.append(tally.file)
        tally.terminal = stack.enter_context(closing(Terminal(failure_files, volume=wanted.volume)))
        consumers.append(tally.terminal)
        events = run(
            candidates,
            wanted.settings,
            wanted.shard,
            wanted.selection,
            fail_fast=wanted.fail_fast,
            failures=wanted.failures,
        )
        for event in stack.enter_context(closing(events)):
            for consumer in consumers:
                consumer(event)


def _available(targets: Sequence[str], tally: _Tally) -> list[str]:
    """Returns the targets without adapters of libraries that are not there, and says which.

    Raises:
        UsageError: if nothing else is among them.
    """
    from lossgate.adapters import available

    there: list[str] = []
    missing: list[UsageError] = []
    for target, error in available(targets):
        if error is None:
            there.append(target)
        else:
            missing.append(error)
    if missing and not there:
        raise missing[0]
    for error in missing:
        say(str(error))
    tally.is_short = bool(missing)
    return there


def _chosen(candidates: Sequence[Candidate], only: Sequence[str]) -> list[Candidate]:
    """Returns the candidates with the names in ``only``, or all if it is empty.

    Raises:
        UsageError: if no candidate has one of the names.
    """
    from lossgate.base.errors import UsageError
    from lossgate.base.spelling import nearest

    names = [candidate.name for candidate in candidates]
    for name in only:
        if name not in names:
            raise UsageError(f"--only {name}: no candidate has this name; {nearest(name, names)}")
    return [candidate for candidate in candidates if not only or candidate.name in only]


def exit_code(results: Iterable[CellResult], *, numbers_only: bool = False) -> Exit:
    """Returns the exit code of the worst cell. Expected known failures count as agreed, and broken
    promises if only numbers count.
    """
    from lossgate.engine.cell_record import Verdict

    verdicts = {result.record.counts_as(numbers_only=numbers_only) for result in results}
    if Verdict.DISAGREE in verdicts:
        return Exit.DISAGREE
    return Exit.INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else Exit.AGREE
