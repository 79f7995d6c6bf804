# SPDX-License-Identifier: Apache-2.0
"""Finds the line of a kernel that made a call or raised, past the frames of torch and lossgate."""

import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch
import typing_extensions

_INNER = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    typing_extensions.__file__,
    threading.__file__,
)
"""The files of torch and lossgate, and of the modules that wrap their functions."""


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
    frames = traceback.extract_tb(error.__traceback__)
    outer = [frame for frame in frames if not frame.filename.startswith(_INNER)] or list(frames)
    return _format_site(outer[-1].filename, outer[-1].lineno or 0, outer[-1].name)


def stack_of(thread: threading.Thread) -> str:
    """Returns the stack of a running thread, from the kernel's outermost line inwards."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame else []
    first = next((i for i, f in enumerate(frames) if not f.filename.startswith(_INNER)), 0)
    return "".join(traceback.format_list(frames[first:]))


def _format_site(file: str, line: int, function: str) -> str:
    path, here = Path(file), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line} in {function}"
