# SPDX-License-Identifier: Apache-2.0
"""Sends what a process prints to a file."""

import os
import sys
from io import TextIOWrapper

STANDARD_OUTPUT, STANDARD_ERROR = 1, 2


def print_to(file: str) -> None:
    """Sends what this process prints to a file. There C code can write too, before a crash.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
    for stream in (STANDARD_OUTPUT, STANDARD_ERROR):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    print_by_line()


def print_by_line() -> None:
    """Writes each line at once, so that the last words before a crash arrive."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, TextIOWrapper):
            output.reconfigure(line_buffering=True)
