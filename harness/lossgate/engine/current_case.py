# SPDX-License-Identifier: Apache-2.0
"""Which problem a process runs, and for which property, in a file that is left when it dies.

Its time of change is a sign of life. Processes that no parent watches write nothing.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lossgate.errors import UsageError
from lossgate.problems.problem import Problem

_NAME = "case"
_RUNNING, _DONE = b"+", b"-"
_END_OF_NAME = b"\n"
_open: list[int] = []
"""The descriptor of the file, if this process writes one."""


def open_in(folder: str) -> None:
    """Has this process write which problem it runs, into a folder of its parent."""
    _open[:] = [os.open(Path(folder, _NAME), os.O_RDWR | os.O_CREAT | os.O_TRUNC)]


@contextmanager
def running(problem: Problem, held_to: str) -> Generator[None]:
    """Writes that a problem runs for a property, and afterwards that it is done."""
    text = _RUNNING + held_to.encode() + _END_OF_NAME + problem.to_json().encode() if _open else b""
    _write(text)
    try:
        yield
    finally:
        _write(_DONE + text[1:])


def none_yet() -> None:
    """Writes that a new job has run no problem yet: that of the last one is not its own."""
    _write(b"")


def _write(text: bytes) -> None:
    for file in _open:
        with suppress(OSError):  # a kernel may have closed it
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))


def beat() -> None:
    """Gives a sign of life."""
    for file in _open:
        with suppress(OSError):
            os.utime(file)


def last_beat(folder: str) -> int:
    """Returns when a process gave its last sign of life; 0 if it has given none."""
    try:
        return Path(folder, _NAME).stat().st_mtime_ns
    except OSError:
        return 0


@dataclass(frozen=True)
class Ran:
    """What a process ran last."""

    problem: Problem
    held_to: str
    """The property."""
    finished: bool


def read(folder: str) -> Ran | None:
    """Returns what a process ran last; None if it ran nothing."""
    try:
        state, text = (content := Path(folder, _NAME).read_bytes())[:1], content[1:]
        held_to, _, problem = text.partition(_END_OF_NAME)
        return Ran(Problem.from_json(problem), held_to.decode(), state == _DONE)
    except (OSError, UnicodeDecodeError, UsageError, ValueError):
        return None
