# SPDX-License-Identifier: Apache-2.0
"""The process of a command: its output, its end, and its temporary folder.

At Ctrl-C or SIGTERM, a command prints a last word, kills its children and ends. If it starts a
process that may be killed, it removes the temporary folder of that process.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from tempfile import mkdtemp
from types import FrameType

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


def print_to(file: str) -> None:
    """Redirects the output of this process to a file, also that of C code before a crash.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
    for stream in (STANDARD_OUTPUT, STANDARD_ERROR):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    print_by_line()


def print_by_line() -> None:
    """Makes Python write each line at once, so that the last lines before a crash are not lost."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, TextIOWrapper):
            output.reconfigure(line_buffering=True)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 1.0
"""Seconds to wait for the end of a killed child."""
_clean_ups = list[Callable[[], object]]()


def before_a_signal_ends(clean_up: Callable[[], object]) -> None:
    """Registers a function that is called before a signal ends this process. Python's own handlers
    for the end of a process do not run then.
    """
    _clean_ups.append(clean_up)


@contextmanager
def ended_by_signals(last_word: Callable[[str], None]) -> Generator[None]:
    """Ends this process and its children at Ctrl-C or SIGTERM, with the exit code that shells
    expect.

    It raises no exception, because Python drops exceptions that are raised while a callback runs,
    such as a callback of its garbage collector. So files must be whole after each write.

    Args:
        last_word: called with the name of the signal, before anything ends.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        try:
            last_word(signal.Signals(number).name)
        finally:
            _end_children()
            for clean_up in _clean_ups:
                clean_up()
            os._exit(128 + number)

    before = {each: signal.signal(each, end) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _end_children() -> None:
    """Kills the children, and waits for their end, so that they make no file after the clean-up."""
    children = multiprocessing.active_children()
    for child in children:
        with suppress(AttributeError, ValueError):  # the signal came while it was being closed
            child.kill()
    for child in children:
        with suppress(AttributeError, ValueError):
            child.join(_PATIENCE)


_TRIES = 100
_of_this_process = list[str]()


def process_folder() -> str:
    """Returns the temporary folder of this process, and makes it if the process has none."""
    if not _of_this_process:
        _of_this_process.append(new_folder())
    return _of_this_process[0]


def take_folder(folder: str) -> None:
    """Sets the folder of this process. Its parent has made the folder, and will remove it."""
    _of_this_process[:] = [folder]


def new_folder() -> str:
    """Makes a temporary folder. It is removed at the latest when this process ends."""
    folder = mkdtemp(prefix="lossgate-")
    remove = partial(remove_folder, folder)
    atexit.register(remove)
    before_a_signal_ends(remove)
    return folder


def remove_folder(folder: str) -> None:
    """Removes a folder, even while other processes make files in it, or remove it too."""
    for _ in range(_TRIES):  # a file that is made after the folder was listed keeps it from being removed
        if not os.path.exists(folder):
            break
        shutil.rmtree(folder, ignore_errors=True)
