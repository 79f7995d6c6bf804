# SPDX-License-Identifier: Apache-2.0
"""Writes to a file which problem a process runs. The file is still there if the process dies.

It also tells the property for which the problem runs, and whether the kernel is being called. Its
time of change is a sign of life. Processes that no parent watches write no file.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.problems.problem import Problem

_NAME = "case"
_END_OF_NAME = b"\n"
_open: list[int] = []
"""The descriptor of the file, if this process writes one."""
_called: list[bool] = []
"""Not empty if a kernel was called in this job."""


class Phase(Enum):
    """How far a process is with a problem. The value is the first byte of the file."""

    NOT_CALLED = b"n"
    """No kernel was called yet in this job. If the process ends now, the kernel is not to blame."""
    IN_CALL = b"c"
    """The kernel is being called."""
    BETWEEN = b"b"
    """The kernel was called, and lossgate works now. A thread of the kernel may still run."""
    DONE = b"d"
    """The problem is done."""


def open_in(folder: str) -> None:
    """Opens the file in a folder of the parent process. From now on this process writes to it."""
    _open[:] = [os.open(Path(folder, _NAME), os.O_RDWR | os.O_CREAT | os.O_TRUNC)]


@contextmanager
def running(problem: Problem, held_to: str) -> Generator[None]:
    """Writes that a problem runs for a property, and afterwards that it is done. As long as the job
    has called no kernel, the phase stays NOT_CALLED.
    """
    if _open:
        _write(_phase().value + held_to.encode() + _END_OF_NAME + problem.to_json().encode())
    try:
        yield
    finally:
        _begin_with(Phase.DONE if _called else Phase.NOT_CALLED)


@contextmanager
def in_call() -> Generator[None]:
    """Writes that the kernel is being called, and afterwards that the call has ended."""
    _called[:] = [True]
    _begin_with(Phase.IN_CALL)
    try:
        yield
    finally:
        _begin_with(Phase.BETWEEN)


def none_yet() -> None:
    """Empties the file, because a new job has run no problem yet."""
    _called.clear()
    _write(b"")


def _phase() -> Phase:
    return Phase.BETWEEN if _called else Phase.NOT_CALLED


def _write(text: bytes) -> None:
    for file in _open:
        with suppress(OSError):  # a kernel may have closed it
            os.pwrite(file, text, 0)
            os.ftruncate(file, len(text))


def _begin_with(phase: Phase) -> None:
    for file in _open:
        with suppress(OSError):
            os.pwrite(file, phase.value, 0)


def beat() -> None:
    """Gives a sign of life."""
    for file in _open:
        with suppress(OSError):
            os.utime(file)


def last_beat(folder: str) -> int:
    """Returns the time of a process's last sign of life, in nanoseconds; 0 if it has given none."""
    try:
        return Path(folder, _NAME).stat().st_mtime_ns
    except OSError:
        return 0


@dataclass(frozen=True)
class Ran:
    """The last problem that a process ran."""

    problem: Problem
    held_to: str
    """The property for which the problem ran."""
    phase: Phase


def read(folder: str) -> Ran | None:
    """Returns the last problem that a process ran; None if it ran none."""
    try:
        content = Path(folder, _NAME).read_bytes()
        held_to, _, problem = content[1:].partition(_END_OF_NAME)
        return Ran(Problem.from_json(problem), held_to.decode(), Phase(content[:1]))
    except (OSError, UnicodeDecodeError, UsageError, ValueError):
        return None
