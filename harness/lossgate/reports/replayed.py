# SPDX-License-Identifier: Apache-2.0
"""Shows what came of a replay."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from lossgate.reports.console import make_console
from lossgate.reports.describe import print_detail
from lossgate.reports.shown_cell import STYLES


def print_replayed(lines: Sequence[str], console: Console | None = None) -> None:
    """Prints the lines of a replay, wrapped at words on a terminal, with the verdict in its colour.

    Args:
        lines: the verdict and the name of the cell, then what is said of it.
        console: where to print (default: standard output).
    """
    place = console or make_console()
    first, *others = lines
    print_detail(place, _coloured(first))
    for line in others:
        print_detail(place, escape(line))


def print_replayed_file(line: str) -> None:
    """Prints the line of one of several files. It stays whole, because it has a path to copy."""
    make_console().print(_coloured(line), soft_wrap=True)


def _coloured(line: str) -> str:
    verdict, _, rest = line.partition(" ")
    style = next((style for word, style in STYLES.items() if word == verdict), "")
    return f"[{style}]{verdict}[/] {escape(rest)}" if style else escape(line)
