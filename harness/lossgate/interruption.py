# SPDX-License-Identifier: Apache-2.0
"""How a command ends at Ctrl-C or SIGTERM: at once, with a last word, and without its children."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 1.0
"""Seconds for the end of a child that was killed."""
_clean_ups = list[Callable[[], object]]()


def before_a_signal_ends(clean_up: Callable[[], object]) -> None:
    """Has something cleaned up that Python's own handlers for the end of a process would clean up:
    a signal does not let them run.
    """
    _clean_ups.append(clean_up)


@contextmanager
def ended_by_signals(last_word: Callable[[str], None]) -> Generator[None]:
    """Ends this process and its children at a signal. The exit code is the one that shells expect.

    It does not raise an exception, because Python drops those that come while a callback runs, such
    as one of its garbage collector. So files must be whole after each write.

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
