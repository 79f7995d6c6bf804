# SPDX-License-Identifier: Apache-2.0
"""Makes the console that prints reports for people to read."""

import os
import re
import sys
from collections.abc import Iterable

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


_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters; XML 1.0 forbids most of them
    r"\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # what reorders or hides text
    r"\ud800-\udfff\ufffe\uffff]"  # what UTF-8 and XML can't hold
)


def plain(text: str) -> str:
    """Returns text with an escape such as ``\\x1b`` for each character that can't be seen.

    Tabs and line feeds stay.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str, limit: int | None = None) -> str:
    """Returns text as a single line.

    Args:
        limit: how many characters are kept (default: all). A cut text says so at its end.
    """
    line = " ".join(plain(text).split())
    return line if limit is None or len(line) <= limit else f"{line[:limit]}... (cut)"


def printable(text: str) -> str:
    """Returns text on one line, with an escape for each line break and what can't be seen."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_lines(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the lines of texts, each fit to be printed."""
    return tuple(printable(line) for text in texts for line in text.splitlines())
