# SPDX-License-Identifier: Apache-2.0
"""Restores state of the process that a cell has changed, so that the next cell starts as it did.

``worlds/process_state.py`` restores the rest after each task. The state here takes too long to read
that often.
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
    """The state of NumPy's generator. None if NumPy is not imported."""
    folder: str
    handlers: tuple[Any, ...]
    recursion_limit: int
    streams: tuple[Any, ...]
    """``sys.stdin``, ``sys.stdout`` and ``sys.stderr``."""
    descriptors: tuple[int, ...]
    """Copies of the file descriptors 0, 1 and 2, which a kernel may close or redirect."""

    @classmethod
    def capture(cls) -> "LeftBehind":
        """Captures the state of this process. Call it in the main thread."""
        numpy = sys.modules.get("numpy")
        return cls(
            process=ProcessState.capture(),
            numpy_random=numpy.random.get_state() if numpy is not None else None,
            folder=os.getcwd(),
            handlers=tuple(signal.getsignal(each) for each in _HANDLED),
            recursion_limit=sys.getrecursionlimit(),
            streams=(sys.stdin, sys.stdout, sys.stderr),
            descriptors=tuple(os.dup(number) for number in _STREAMS),
        )

    def restore(self) -> None:
        """Restores the state. Call it once."""
        self.process.restore()
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)
        os.chdir(self.folder)
        sys.setrecursionlimit(self.recursion_limit)
        sys.stdin, sys.stdout, sys.stderr = self.streams
        for number, copy in zip(_STREAMS, self.descriptors, strict=True):
            with suppress(OSError):  # the kernel closed the copy, too
                os.dup2(copy, number)
                os.close(copy)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in zip(_HANDLED, self.handlers, strict=True):
            if handler is not None:
                signal.signal(each, handler)
