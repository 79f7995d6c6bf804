# SPDX-License-Identifier: Apache-2.0
"""The command line: ``lossgate verify | replay | list``.

Exit codes: 0 agree, 1 disagree, 2 usage or configuration, 3 inconclusive (nothing wrong seen, not
enough seen).

What a command needs is imported in it: torch takes seconds to load, and a typing error should not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from lossgate.interruption import ended_by_signals

if TYPE_CHECKING:
    from lossgate.engine.cell import CellResult
    from lossgate.engine.events import Event
    from lossgate.engine.settings import Settings
    from lossgate.reports.terminal import Terminal

app = App(name="lossgate", help="Judge whether loss kernels compute the losses they claim to.", version_flags=[])


_UNTIL_SAID = 5.0
"""Seconds in which rank 0 of a torchrun prints an error that all its processes find."""


class Exit(IntEnum):
    """The meaning of each exit code."""

    AGREE = 0
    DISAGREE = 1
    USAGE = 2
    INCONCLUSIVE = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; exits.

    An error of the user's is one line on stderr. ``arguments`` are those of the process by default.
    """
    from lossgate.errors import UsageError
    from lossgate.launch import is_follower

    try:
        code = app(
            sys.argv[1:] if arguments is None else arguments,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
    except (CycloptsError, UsageError) as error:
        if is_follower():  # it finds the same as rank 0, which torchrun would end before it has said so
            time.sleep(_UNTIL_SAID)
        else:
            print(f"lossgate: {' '.join(str(error).split())}", file=sys.stderr)
        code = Exit.USAGE
    sys.exit(code)


@app.command
def verify(
    *targets: str,
    layout: Annotated[list[str] | None, Parameter(negative=())] = None,
    dtype: Annotated[list[str] | None, Parameter(negative=())] = None,
    profile: str = "dev",
    examples: int | None = None,
    ranks: int | None = None,
    world: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    jobs: int | None = None,
    evidence: Path | None = None,
    failures: Path = Path(".lossgate"),
) -> int:
    """Judge candidates against the references of their specs, on ranks.

    Args:
        targets: Files (file.py), modules (package.module), or one candidate of either
            (file.py:name).
        layout: A layout, such as tp=2,cp=2 or single; may be repeated. By default every layout of
            at most --ranks ranks.
        dtype: float32, bfloat16 or float16; may be repeated. By default all that a candidate takes.
        profile: dev, ci, nightly, release, or one of [tool.lossgate.profiles] in pyproject.toml.
        examples: Problems for each cell. A cell is one candidate, property, layout and dtype.
        ranks: Ranks of the largest layout.
        world: Where ranks run: simulated (all in this process, the default), gloo or nccl (one
            process each), or torchrun (the processes that torchrun has launched).
        device: Where ranks compute: cpu (the default) or cuda.
        seed: Another seed draws other problems.
        timeout: Seconds that a rank may take to the next collective or, if it is a process, to
            return. Then it counts as hanging.
        jobs: Processes side by side; 0 for one on each core.
        evidence: Append a JSON line for each cell to this file.
        failures: Folder for failure files.
    """
    from lossgate.engine.settings import load_settings
    from lossgate.errors import UsageError

    if not targets:
        raise UsageError("verify: nothing named; expected files or modules with candidates, such as my_kernels.py")
    lists: dict[str, Any] = {"layouts": tuple(layout) if layout else None, "dtypes": tuple(dtype) if dtype else None}
    settings = load_settings(
        profile,
        examples=examples,
        ranks=ranks,
        world=world,
        device=device,
        seed=seed,
        timeout=timeout,
        jobs=jobs,
        **lists,
    )
    return _driven(settings.world, lambda: _verify(targets, settings, evidence, failures))


def _driven(world: str, body: Callable[[], int]) -> int:
    """Runs a command. If torchrun has launched this process, rank 0 runs it, and the others serve.

    Raises:
        UsageError: if torchrun has launched several, and the command needs other ranks.
    """
    from lossgate.errors import UsageError
    from lossgate.launch import is_follower, launch_of_torchrun

    launch = launch_of_torchrun()
    if launch is not None and launch.ranks > 1 and world != "torchrun":
        raise UsageError(
            f"torchrun launched {launch.ranks} processes, and each would do everything in world {world!r}; "
            "add --world torchrun, or start without torchrun"
        )
    if launch is None or world != "torchrun":
        return body()
    if is_follower():
        from lossgate.worlds.torchrun import follow

        return follow()
    code = Exit.USAGE
    try:
        code = body()
    finally:
        from lossgate.worlds.torchrun import dismiss

        sys.stdout.flush()  # before torchrun sees a process end, and ends the others
        dismiss(code)
    return code


def _verify(targets: Sequence[str], settings: Settings, evidence: Path | None, failures: Path) -> int:
    """Verifies until it is done or a signal asks to stop; returns the exit code."""
    tally = _Tally(evidence)
    with ended_by_signals(tally.stop):
        _run(targets, settings, evidence, failures, tally)
    return tally.code


class _Tally:
    """Counts cells, and finds the exit code."""

    def __init__(self, evidence: Path | None) -> None:
        self.code = Exit.AGREE
        self.terminal: Terminal | None = None
        self._evidence, self._cells, self._done = evidence, 0, 0

    def __call__(self, event: Event) -> None:
        from lossgate.engine.events import CellFinished, RunStarted

        if isinstance(event, RunStarted):
            self._cells = len(event.cells)
        elif isinstance(event, CellFinished):
            self._done += 1
        else:
            code = exit_code(event.results)
            self.code = Exit.INCONCLUSIVE if event.stopped and code is Exit.AGREE else code

    def stop(self, signal: str) -> None:
        """Says how far the run came before a signal stopped it."""
        if self.terminal is not None:
            self.terminal.close()
        kept = f"; their evidence is in {self._evidence}" if self._evidence is not None and self._done else ""
        print(f"lossgate: stopped by {signal} after {self._done} of {self._cells} cells{kept}", file=sys.stderr)


def _run(targets: Sequence[str], settings: Settings, evidence: Path | None, failures: Path, tally: _Tally) -> None:
    if settings.jobs != 1 or settings.world in ("gloo", "nccl"):
        from lossgate.fork_server import worker_context

        worker_context()  # other processes load torch while this one does

    from lossgate.declaration.loading import load_candidates
    from lossgate.engine.events import Consumer
    from lossgate.engine.run import run
    from lossgate.evidence.writer import EvidenceFile
    from lossgate.reports.failures import FailureFiles
    from lossgate.reports.terminal import Terminal

    candidates = [candidate for target in targets for candidate in load_candidates(target)]
    with ExitStack() as stack:
        failure_files = FailureFiles(failures)
        consumers: list[Consumer] = [failure_files, tally]
        if evidence is not None:
            consumers.append(stack.enter_context(closing(EvidenceFile(evidence, settings.seed))))
        tally.terminal = stack.enter_context(closing(Terminal(failure_files)))
        consumers.append(tally.terminal)
        for event in stack.enter_context(closing(run(candidates, settings))):
            for consumer in consumers:
                consumer(event)


def exit_code(results: Iterable[CellResult]) -> Exit:
    """Returns the code of the worst cell; known failures count as agreed."""
    from lossgate.engine.cell import Verdict

    verdicts = {Verdict.AGREE if result.passes else result.verdict for result in results}
    if Verdict.DISAGREE in verdicts:
        return Exit.DISAGREE
    return Exit.INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else Exit.AGREE


@app.command
def replay(
    file: Path, /, *, candidate: str | None = None, world: str | None = None, timeout: float | None = None
) -> int:
    """Judge the problem of a failure file again.

    Args:
        file: A failure file, as verify writes it.
        candidate: Judge this one (file.py:name) instead of the one that the file names.
        world: Where ranks run: simulated, gloo, nccl or torchrun. By default where the problem
            failed.
        timeout: Seconds that a rank may take to the next collective or, if it is a process, to
            return. Then it counts as hanging.
    """
    from lossgate.engine.failure_files import read_failure
    from lossgate.engine.replay import replay_failure
    from lossgate.worlds.base import WorldLost

    failure = read_failure(file)
    world = world or failure.world

    def body() -> int:
        try:
            outcome = replay_failure(failure, candidate, world, timeout)
        except WorldLost as error:
            print(f"lossgate: {error}", file=sys.stderr)
            return Exit.INCONCLUSIVE
        print("\n".join(outcome.lines))
        return Exit.DISAGREE if outcome.disagrees else Exit.AGREE

    return _driven(world, body)


@app.command(name="list")
def list_(*targets: str) -> int:
    """List specs with their options, and properties; or the candidates of files and modules.

    Args:
        targets: Files (file.py) or modules (package.module); none for specs and properties.
    """
    from lossgate.reports.console import make_console
    from lossgate.reports.listing import candidates_table, properties_table, spec_tables

    console = make_console()
    for table in [*map(candidates_table, targets)] if targets else [*spec_tables(), properties_table()]:
        console.print(table)
    return Exit.AGREE
