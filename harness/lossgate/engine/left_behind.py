# SPDX-License-Identifier: Apache-2.0
"""What a cell leaves changed in its process beside what each task restores: the next one has it as
it was.

See ``worlds/process_state.py`` for the rest. These take too long to read before each task.
"""

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lossgate.worlds.process_state import ProcessState

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)

_STREAMS = (0, 1, 2)


@dataclass(frozen=True, eq=False)
class LeftBehind:
    """State of a process, captured before a job."""

    process: ProcessState
    numpy_random: Any
    """The state of NumPy's generator, or None if nobody has imported NumPy."""
    folder: str
    handlers: tuple[Any, ...]
    recursion_limit: int
    streams: tuple[Any, ...]
    """``sys.stdin``, ``sys.stdout`` and ``sys.stderr``."""
    descriptors: tuple[int, ...]
    """Copies of those of the system, which a kernel may close or turn elsewhere."""

    @classmethod
    def capture(cls) -> "LeftBehind":
        """Captures the state of this process. Call it in its main thread."""
        return cls(
            ProcessState.capture(),
            numpy.random.get_state() if (numpy := sys.modules.get("numpy")) is not None else None,
            os.getcwd(),
            tuple(signal.getsignal(each) for each in _HANDLED),
            sys.getrecursionlimit(),
            (sys.stdin, sys.stdout, sys.stderr),
            tuple(os.dup(number) for number in _STREAMS),
        )

    def restore(self) -> None:
        """Sets it back. Call it once."""
        self.process.restore()
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)
        os.chdir(self.folder)
        sys.setrecursionlimit(self.recursion_limit)
        sys.stdin, sys.stdout, sys.stderr = self.streams
        for number, copy in zip(_STREAMS, self.descriptors, strict=True):
            with suppress(OSError):  # a kernel closed the copy too
                os.dup2(copy, number)
                os.close(copy)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in zip(_HANDLED, self.handlers, strict=True):
            if handler is not None:
                signal.signal(each, handler)
