# SPDX-License-Identifier: Apache-2.0
"""``lossgate replay``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lossgate.cli.app import Exit, Number, app, driven, load, say

if TYPE_CHECKING:
    from lossgate.engine.failure_files import FailureFile
    from lossgate.engine.replay import Replayed

_FOLDER = Path(".lossgate")


@app.command
def replay(
    *files: Path,
    all_: Annotated[bool, Parameter(name="--all", negative=())] = False,
    candidate: str | None = None,
    trust: Annotated[bool, Parameter(negative=())] = False,
    world: str | None = None,
    timeout: Number = None,
    script: Path | None = None,
) -> int:
    """Judge the problem of a failure file again.

    Args:
        files: A failure file, as verify writes it, or several, of which each has a line; with --all
            a folder of them, by default .lossgate. They name code, which is run: replay only files
            that you trust.
        all_: Judge the problems of all failure files in a folder, and print a line for each.
        candidate: Judge this one (file.py:name) instead of the one that the file names.
        trust: Run the candidate that the file names although it lies outside the working folder.
        world: Where ranks run: simulated, gloo, nccl or torchrun. By default where the problem
            failed.
        timeout: Seconds that a rank may take to the next collective or, if it is a process, to
            return. Then it counts as hanging.
        script: Judge nothing, and write this file: a script that calls the kernel with the same
            numbers and shows what it gives beside what is right. It needs torch and the kernel.
    """
    from lossgate.base.errors import UsageError

    if not files and not all_:
        raise UsageError("replay: nothing named; expected a failure file, as verify writes it, or --all")
    if all_ and len(files) > 1:
        raise UsageError(f"replay: --all takes one folder, not {len(files)}; leave out --all to replay files")
    if script is not None and (all_ or len(files) > 1):
        raise UsageError("replay: --script writes one script of one failure file; leave out --all, and name the file")
    for file in files:
        if file.is_dir() and not all_:
            raise UsageError(f"{file} is a folder; replay all failure files in it: lossgate replay --all {file}")
    how = _How(candidate, world, timeout, trust or candidate is not None)
    first = next(iter(files), _FOLDER)
    if script is not None:
        return how.write_script(first, script)
    load()
    if all_:
        return how.all_in(first)
    return how.each(files) if len(files) > 1 else how.one(first)


class _How:
    """How failure files are replayed."""

    def __init__(self, candidate: str | None, world: str | None, timeout: float | None, trust: bool) -> None:
        self._candidate, self._world, self._timeout, self._trust = candidate, world, timeout, trust

    def one(self, file: Path) -> int:
        """Replays one; prints all of what came of it, and returns the exit code."""
        from lossgate.reports.describe import print_replayed
        from lossgate.worlds.base import WorldLost

        failure = self._read(file)

        def body() -> int:
            try:
                outcome = self._replay(failure)
            except WorldLost as error:
                print(f"lossgate: {error}", file=sys.stderr)
                return Exit.INCONCLUSIVE
            print_replayed(outcome.lines)
            return _code(outcome)

        return driven(self._world or failure.world, body)

    def all_in(self, folder: Path) -> int:
        """Replays those in a folder; prints a line for each, and returns the worst exit code.

        Raises:
            UsageError: if there is no such folder.
        """
        from lossgate.base.errors import UsageError

        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no such folder; verify writes failure files to .lossgate, or where --failures says: "
                "lossgate replay --all FOLDER"
            )
        return self.each(sorted(folder.glob("*.json")), f" in {folder}")

    def each(self, files: Sequence[Path], where: str = "") -> int:
        """Replays several; prints a line for each, and returns the worst exit code."""
        return driven(self._world or "simulated", lambda: self._each(files, where))

    def _each(self, files: Sequence[Path], where: str) -> int:
        from lossgate.base.spelling import counted

        codes = Counter[Exit](self._line_of(file) for file in files)
        order = (Exit.DISAGREE, Exit.USAGE, Exit.INCONCLUSIVE, Exit.AGREE)
        found = ", ".join(f"{codes[code]} {_WORDS[code]}" for code in reversed(order) if codes[code])
        print(f"{counted(len(files), 'failure file')}{where}{': ' if found else ''}{found}")
        return next((code for code in order if codes[code]), Exit.AGREE)

    def _line_of(self, file: Path) -> Exit:
        """Replays one of several; prints a line, and returns its exit code."""
        from lossgate.base.errors import UsageError
        from lossgate.reports.describe import print_replayed_file
        from lossgate.worlds.base import WorldLost

        try:
            outcome = self._replay(self._read(file))
        except UsageError as error:
            say(str(error) if str(file) in str(error) else f"{file}: {error}")
            return Exit.USAGE
        except WorldLost as error:
            say(f"{file}: {error}")
            return Exit.INCONCLUSIVE
        print_replayed_file(f"{outcome.title}  {file}: {outcome.since or outcome.findings[0]}")
        return _code(outcome)

    def write_script(self, file: Path, script: Path) -> int:
        """Writes the script of one."""
        from lossgate.reports.reproducer import write_script

        write_script(self._read(file), self._candidate, script)
        print(f"wrote {script}; run it with: python {script}")
        return Exit.AGREE

    def _read(self, file: Path) -> FailureFile:
        from lossgate.engine.failure_files import read_failure
        from lossgate.engine.trust import check_trusted

        failure = read_failure(file)
        if not self._trust:
            check_trusted(failure, file)
        return failure

    def _replay(self, failure: FailureFile) -> Replayed:
        from lossgate.engine.replay import replay_failure

        return replay_failure(failure, self._candidate, self._world or failure.world, self._timeout)


_WORDS = {
    Exit.AGREE: "AGREE",
    Exit.INCONCLUSIVE: "INCONCLUSIVE",
    Exit.USAGE: "not replayed",
    Exit.DISAGREE: "DISAGREE",
}
"""What the summary calls each exit code."""


def _code(outcome: Replayed) -> Exit:
    return Exit[outcome.verdict.value]
