# SPDX-License-Identifier: Apache-2.0
"""Finds the line of a kernel that made a call or raised, past the frames of torch and lossgate."""

import contextlib
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
from types import FrameType, ModuleType

import torch
import typing_extensions

from lossgate.base.errors import LossgateError

_LOSSGATE = str(Path(__file__).parents[1])
_CALLER = str(Path(_LOSSGATE, "declaration", "candidate.py"))
"""The file that calls kernels. It raises what a kernel does that is not written in Python."""
_INNER = (
    str(Path(torch.__file__).parent),
    _LOSSGATE,
    typing_extensions.__file__,
    threading.__file__,
    contextlib.__file__,
)
"""The files of torch and lossgate, and of the modules that wrap their functions."""
_AROUND = (*_INNER, str(Path(multiprocessing.__file__).parent), "<")
"""The files of the code that runs a task: those of ``_INNER``, and Python's start of a process."""
_DISTRIBUTED = str(Path(torch.__file__).parent / "distributed")


def call_site() -> str:
    """Returns the innermost line of the running code that is neither in torch nor in lossgate."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    if frame is None:
        return "unknown"
    return _format_site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def raise_site(error: BaseException) -> str:
    """Returns the innermost line of an exception's traceback that is not in torch or lossgate.

    If all lines are in torch or lossgate, returns the innermost line.
    """
    return _site_in(traceback.extract_tb(error.__traceback__))


def own_fault(error: BaseException) -> BaseException | None:
    """Returns the exception that lossgate itself raised and did not mean to raise, or None.

    It is the one given, or that from which an error about a candidate was raised.
    """
    return next((each for each in (error, error.__cause__) if each is not None and _is_own_fault(each)), None)


def _is_own_fault(error: BaseException) -> bool:
    """Returns whether lossgate itself raised an exception that it did not mean to raise.

    A kernel has no line in its traceback, unless lossgate asks a module for a name that is not
    there, as one of another torch. Errors of torch and a lack of memory do not count, because a
    kernel may have caused them before, nor do those of imports.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    of_lossgate = files[-1].startswith(_LOSSGATE) and files[-1] != _CALLER
    lacks = isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)
    no_kernel = lacks or all(f.startswith(_INNER) for f in files)
    meant = RuntimeError, MemoryError, ImportError, LossgateError
    return of_lossgate and no_kernel and isinstance(error, Exception) and not isinstance(error, meant)


def raise_stack(error: BaseException) -> str:
    """Returns an exception's traceback, from the kernel's outermost line to its innermost."""
    return _from_kernel(traceback.extract_tb(error.__traceback__))


def raise_collective(error: BaseException) -> str | None:
    """Returns the function of torch.distributed that raised an exception; None if none did."""
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

    Garbage collection is off meanwhile. CPython 3.11.7 holds the lock of its list of threads during
    the call, and a collection that lets another thread run then waits for ever (gh-106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _from_kernel(frames: Sequence[FrameSummary]) -> str:
    """Returns the kernel's own part of a stack.

    It leaves out the outer frames, which run the kernel, and the inner frames of torch and lossgate
    that the kernel called.
    """
    outer = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(_AROUND)), 0)
    inner = next((i for i, frame in enumerate(reversed(frames)) if not frame.filename.startswith(_INNER)), 0)
    own = frames[outer : len(frames) - inner]
    return "".join(f'  File "{f.filename}", line {f.lineno}, in {f.name}\n    {f.line}\n' for f in own)


def _site_in(frames: Sequence[FrameSummary]) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_INNER)]
    innermost = (own or frames)[-1]
    return _format_site(innermost.filename, innermost.lineno or 0, innermost.name)


def _collective_in(frames: Sequence[FrameSummary]) -> str | None:
    """Returns the function of torch.distributed that the kernel's innermost line called, if any."""
    inner = [*takewhile(lambda frame: frame.filename.startswith(_INNER), reversed(frames))]
    called = [frame.name for frame in inner if frame.filename.startswith(_DISTRIBUTED) and frame.name != "wrapper"]
    return called[-1] if called else None


def _format_site(file: str, line: int, function: str) -> str:
    return _formatted(file, line, function, os.getcwd())


@cache
def _formatted(file: str, line: int, function: str, folder: str) -> str:
    path = Path(file)
    shown = path.relative_to(folder) if path.is_relative_to(folder) else path
    return f"{shown}:{line} in {function}"
