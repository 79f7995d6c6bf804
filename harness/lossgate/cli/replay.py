# SPDX-License-Identifier: Apache-2.0
"""``lossgate replay``."""

from __future__ import annotations

import sys
from pathlib import Path

from lossgate.cli.app import Exit, app, driven


@app.command
def replay(
    file: Path,
    /,
    *,
    candidate: str | None = None,
    world: str | None = None,
    timeout: float | None = None,
    script: Path | None = None,
) -> int:
    """Judge the problem of a failure file again.

    Args:
        file: A failure file, as verify writes it.
        candidate: Judge this one (file.py:name) instead of the one that the file names.
        world: Where ranks run: simulated, gloo, nccl or torchrun. By default where the problem
            failed.
        timeout: Seconds that a rank may take to the next collective or, if it is a process, to
            return. Then it counts as hanging.
        script: Judge nothing, and write this file: a script that calls the kernel with the same
            numbers and shows what it gives beside what is right. It needs torch and the kernel.
    """
    if script is not None:
        return _write_script(file, candidate, script)
    from lossgate.fork_server import worker_context

    if world != "torchrun":
        worker_context()  # other processes load torch while this one does

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

    return driven(world, body)


def _write_script(file: Path, candidate: str | None, script: Path) -> int:
    from lossgate.engine.failure_files import read_failure
    from lossgate.reports.reproducer import write_script

    write_script(read_failure(file), candidate, script)
    print(f"wrote {script}; run it with: python {script}")
    return Exit.AGREE
