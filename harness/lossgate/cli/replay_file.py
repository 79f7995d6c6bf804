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
    from lossgate.engine.judge_again import Replayed

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
    verbose: Annotated[bool, Parameter(name=["-v", "--verbose"], negative=())] = False,
) -> int:
    """Judge the problem of a failure file again.

    Args:
        files: Failure files that verify wrote. If there are several, each gets one line. With --all
            a folder of failure files, by default .lossgate. The files name code that is run, so
            replay only files that you trust.
        all_: Judge the problems of all failure files in a folder, and print a line for each.
        candidate: Judge this candidate (file.py:name) instead of the one that the file names.
        trust: Run the candidate that the file names, even if it lies outside the working folder.
        world: Where ranks run: simulated, gloo, nccl or torchrun. By default where the problem
            failed.
        timeout: Seconds that a rank may take until its next collective or, if it is a process,
            until it returns. After that it counts as hanging.
        script: Judge nothing, but write this script. It calls the kernel with the same numbers, and
            prints what the kernel returns next to what is right. It needs only torch and the
            kernel.
        verbose: Also show the statistics over their limit.
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
    how = _How(candidate, world, timeout, trust or candidate is not None, verbose)
    first = next(iter(files), _FOLDER)
    if script is not None:
        return how.write_script(first, script)
    load()
    if all_:
        return how.all_in(first)
    return how.each(files) if len(files) > 1 else how.one(first)


class _How:
    """Replays failure files in the way that the options of the command ask for."""

    def __init__(
        self, candidate: str | None, world: str | None, timeout: float | None, trust: bool, verbose: bool
    ) -> None:
        self._candidate, self._world, self._timeout = candidate, world, timeout
        self._trust, self._verbose = trust, verbose

    def one(self, file: Path) -> int:
        """Replays a single file, prints the whole result, and returns the exit code."""
        from lossgate.reports.describe import print_replayed
        from lossgate.worlds.base import WorldLost

        failure = self._read(file)

        def body() -> int:
            try:
                outcome = self._replay(failure)
            except WorldLost as error:
                print(f"lossgate: {error}", file=sys.stderr)
                return Exit.INCONCLUSIVE
            print_replayed(outcome.lines(whole=self._verbose))
            return _code(outcome)

        return driven(self._world or failure.world, body)

    def all_in(self, folder: Path) -> int:
        """Replays all files in a folder, prints a line for each, and returns the worst exit code.

        Raises:
            UsageError: if there is no such folder.
        """
        from lossgate.base.errors import UsageError

        if not folder.is_dir():
            raise UsageError(
                f"{folder}: no such folder; verify writes failure files to .lossgate, or to the folder of its "
                "--failures, so run: lossgate replay --all FOLDER"
            )
        return self.each(sorted(folder.glob("*.json")), f" in {folder}")

    def each(self, files: Sequence[Path], where: str = "") -> int:
        """Replays several files, prints a line for each, and returns the worst exit code."""
        return driven(self._world or "simulated", lambda: self._each(files, where))

    def _each(self, files: Sequence[Path], where: str) -> int:
        from lossgate.base.spelling import counted

        found = [self._replay_in_a_line(file) for file in files]
        codes, words = {code for code, _ in found}, Counter(word for _, word in found)
        worst_first = (Exit.DISAGREE, Exit.USAGE, Exit.INCONCLUSIVE, Exit.AGREE)
        title = f"{counted(len(files), 'failure file')}{where}"
        counts = ", ".join(f"{words[word]} {word}" for word in _WORDS if words[word])
        print(f"{title}: {counts}" if counts else title)
        return next((code for code in worst_first if code in codes), Exit.AGREE)

    def _replay_in_a_line(self, file: Path) -> tuple[Exit, str]:
        """Replays one of several files, prints a line, and returns the exit code of the file and a
        word for it.
        """
        from lossgate.base.errors import UsageError
        from lossgate.reports.describe import print_replayed_file
        from lossgate.worlds.base import WorldLost

        try:
            outcome = self._replay(self._read(file))
        except UsageError as error:
            say(str(error) if str(file) in str(error) else f"{file}: {error}")
            return Exit.USAGE, "not replayed"
        except WorldLost as error:
            say(f"{file}: {error}")
            return Exit.INCONCLUSIVE, "INCONCLUSIVE"
        print_replayed_file(f"{outcome.title}  {file}: {outcome.since or (*outcome.findings, *outcome.on)[0]}")
        return _code(outcome), outcome.outcome

    def write_script(self, file: Path, script: Path) -> int:
        """Writes a script that calls the kernel on the problem of a failure file."""
        from lossgate.reports.reproducer import write_script

        write_script(self._read(file), self._candidate, script)
        print(f"wrote {script}; run it with: python {script}")
        return Exit.AGREE

    def _read(self, file: Path) -> FailureFile:
        from lossgate.engine.failure_files import check_trusted, read_failure

        failure = read_failure(file)
        if not self._trust:
            check_trusted(failure, file)
        return failure

    def _replay(self, failure: FailureFile) -> Replayed:
        from lossgate.engine.judge_again import replay_failure

        return replay_failure(failure, self._candidate, self._world or failure.world, self._timeout)


_WORDS = ("AGREE", "INCONCLUSIVE", "not replayed", "PROMISE BROKEN", "DISAGREE")
"""The words of the summary, in order."""


def _code(outcome: Replayed) -> Exit:
    return Exit[outcome.verdict.value]
