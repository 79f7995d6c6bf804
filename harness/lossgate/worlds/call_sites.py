# SPDX-License-Identifier: Apache-2.0
"""Finds the line of a kernel that made a call or raised, past the frames of torch and lossgate."""

import gc
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from traceback import FrameSummary
from types import FrameType

import torch
import typing_extensions

_INNER = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    typing_extensions.__file__,
    threading.__file__,
)
"""The files of torch and lossgate, and of the modules that wrap their functions."""
_AROUND = (*_INNER, str(Path(multiprocessing.__file__).parent), "<")
"""The files of what runs a task: those above, and Python's own start of a process."""
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")


def call_site() -> str:
    """Returns the innermost line of the running code that is neither in torch nor in lossgate."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    return _format_site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else "unknown"


def raise_site(error: BaseException) -> str:
    """Returns the innermost line of an exception's traceback that is not in torch or lossgate.

    If all lines are, returns the innermost one.
    """
    return _site_in(traceback.extract_tb(error.__traceback__))


def raise_stack(error: BaseException) -> str:
    """Returns an exception's traceback, from the kernel's outermost line to its innermost."""
    return _from_kernel(traceback.extract_tb(error.__traceback__))


def raise_collective(error: BaseException) -> str | None:
    """Returns the function of torch.distributed that raised an exception, or None."""
    return _collective_in(traceback.extract_tb(error.__traceback__))


def stack_of(thread: int | None) -> str:
    """Returns the stack of a running thread, from the kernel's outermost line to its innermost.

    Args:
        thread: its ``ident``.
    """
    return _from_kernel(_frames_of(thread))


def collective_of(thread: int | None) -> str | None:
    """Returns the function of torch.distributed that a thread is in, or None if it is in none."""
    return _collective_in(_frames_of(thread))


def site_of(thread: int | None) -> str:
    """Returns the innermost line of a running thread that is neither in torch nor in lossgate."""
    frames = _frames_of(thread)
    return _site_in(frames) if frames else "unknown"


def _frames_of(thread: int | None) -> Sequence[FrameSummary]:
    frame = _current_frames().get(thread or 0)
    return traceback.extract_stack(frame) if frame else []


def _current_frames() -> Mapping[int, FrameType]:
    """Returns the innermost frame of each thread.

    No garbage is collected meanwhile. CPython 3.11.7 holds the lock of its list of threads there,
    and a collection that lets another thread run then waits for ever (gh-106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _from_kernel(frames: Sequence[FrameSummary]) -> str:
    """Returns the stack between the frames of what runs the kernel and those of what it calls."""
    first = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(_AROUND)), 0)
    after = next((i for i, frame in enumerate(reversed(frames)) if not frame.filename.startswith(_INNER)), 0)
    own = frames[first : len(frames) - after]
    return "".join(f'  File "{f.filename}", line {f.lineno}, in {f.name}\n    {f.line}\n' for f in own)


def _site_in(frames: Sequence[FrameSummary]) -> str:
    outer = [frame for frame in frames if not frame.filename.startswith(_INNER)] or list(frames)
    return _format_site(outer[-1].filename, outer[-1].lineno or 0, outer[-1].name)


def _collective_in(frames: Sequence[FrameSummary]) -> str | None:
    """Returns the function of torch.distributed that the kernel's innermost line called, if any."""
    inside = [*takewhile(lambda frame: frame.filename.startswith(_INNER), reversed(frames))]
    called = [frame.name for frame in inside if frame.filename.startswith(_DISTRIBUTED) and frame.name != "wrapper"]
    return called[-1] if called else None


def _format_site(file: str, line: int, function: str) -> str:
    return _formatted(file, line, function, os.getcwd())


@cache
def _formatted(file: str, line: int, function: str, folder: str) -> str:
    path, here = Path(file), Path(folder)
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line} in {function}"
