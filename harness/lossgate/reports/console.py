# SPDX-License-Identifier: Apache-2.0
"""Makes the console that prints reports for people to read."""

import os
import sys

from rich.console import Console, RenderableType
from rich.text import Text

_WIDTH = 180
"""Width without a terminal. All columns of the verdict table fit, with names of 45 characters."""


class _Console(Console):
    """Reports a closed pipe as Python does: rich would exit with the code of a disagreement."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console() -> Console:
    """Makes a console for standard output.

    Returns:
        A console as wide as the terminal, with colours unless ``NO_COLOR`` is set. Without a
        terminal it has a fixed width and no colours, so that a log reads the same everywhere;
        ``FORCE_COLOR`` gives it colours. It is interactive only if people watch the terminal. In CI
        and in files there is no progress bar.
    """
    console = _Console(highlight=False, emoji=False)
    if not console.is_terminal or not (sys.stdout.isatty() or "COLUMNS" in os.environ):
        console.width = _WIDTH
    if not sys.stdout.isatty() or _in_ci():
        console.is_interactive = False
    return console


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def print_whole(console: Console, table: RenderableType) -> None:
    """Prints a table. Without a terminal its lines have no blanks at their end."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.print(Text(line.rstrip()), soft_wrap=True)
