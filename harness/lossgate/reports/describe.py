# SPDX-License-Identifier: Apache-2.0
"""Describes a cell that does not agree, line by line."""

import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from lossgate.reports.causes import CausesSoFar, causes_in_common
from lossgate.reports.remarks import EXCLUDED, EXEMPT, NOT_DISTINGUISHED, remark_lines
from lossgate.reports.shown_cell import ShownCell

_REPLAY = "  replay: "
_TO_COPY = re.compile(rf'{_REPLAY}| *File "')


def heading(cell: ShownCell) -> str:
    """Returns the verdict of a cell and its name, in rich markup."""
    return f"{marked(cell)}  {escape(cell.candidate)}  {_where(cell)}"


def describe(cell: ShownCell, so_far: CausesSoFar | None = None) -> list[str]:
    """Returns in full why a cell does not agree, in lines of rich markup.

    Args:
        cell: what is shown.
        so_far: knows the causes that were shown of other cells, and remembers this one's.
    """
    lines = [f"  {escape(line)}" for line in (*cell.reasons, *(so_far or CausesSoFar()).lines(cell))]
    if cell.on is not None:
        lines += [f"  on: {escape(cell.on)}", *(f"    {escape(line)}" for line in cell.side_by_side)]
    if cell.replay is not None:
        lines.append(replay_line(escape(cell.replay)))
    return lines


def replay_line(command: str) -> str:
    """Returns the line that shows a command, which ``print_detail`` never wraps."""
    return f"{_REPLAY}{command}"


def _where(cell: ShownCell) -> str:
    return escape(f"{cell.dtype}  {cell.layout}" + (f"  on {cell.place}" if cell.place else ""))


def marked(cell: ShownCell) -> str:
    """Returns the verdict in its colour."""
    return f"[{cell.verdict.style}]{escape(str(cell.verdict))}[/]"


def print_remarks(console: Console, cells: Sequence[ShownCell]) -> None:
    """Prints the causes that several cells have, what was not seen in cells, what they were not
    held to, and what they were not given; the same of many cells once.
    """
    not_distinguished = remark_lines(NOT_DISTINGUISHED, ((cell.candidate, cell.not_distinguished) for cell in cells))
    for lines in (
        causes_in_common(cells),
        not_distinguished,
        remark_lines(EXEMPT, ((cell.candidate, cell.exempt) for cell in cells)),
        remark_lines(EXCLUDED, ((cell.candidate, cell.excluded) for cell in cells)),
    ):
        for line in lines:
            print_detail(console, escape(line))
        if lines:
            console.print()


def print_detail(console: Console, line: str) -> None:
    """Prints one line of a description, wrapped at words on a terminal. What continues it is
    indented further, so that it is no line of its own.

    The replay command and places in files stay one line, because a line break in them would be
    copied, too. In a file every line stays whole, so that it can be searched.

    Args:
        console: where to print.
        line: in rich markup.
    """
    if not console.is_terminal or _TO_COPY.match(line):
        console.print(line, soft_wrap=True)
        return
    text = line.lstrip(" ")
    indent = len(line) - len(text)
    for number, part in enumerate(_wrapped(console, Text.from_markup(_NOT_APART.sub(_JOINED, text)), indent)):
        part.plain = part.plain.replace(_JOINED, " ")
        console.print(Text(" " * (indent + _HANGING * (number > 0))) + part, soft_wrap=True)


_HANGING = 4
"""How much further the continuation of a line is indented: more than a line below it."""
_JOINED = "\ue000"
"""Stands for a blank at which a line is not broken."""
_NOT_APART = re.compile(r"(?<=\d) (?=\+- \d|m?s\b|CPU s\b)|(?<=\+-) (?=\d)|(?<=CPU) (?=s\b)")
"""Blanks between a number and its error or unit."""


def _wrapped(console: Console, text: Text, indent: int) -> Iterator[Text]:
    """Yields the lines of a text, the first of which has more room than the others."""
    first, *others = text.wrap(console, max(console.width - indent, 1))
    rest = len(first.plain)
    first.rstrip()
    yield first
    if others:
        rest += len(text.plain[rest:]) - len(text.plain[rest:].lstrip())
        for line in text[rest:].wrap(console, max(console.width - indent - _HANGING, 1)):
            line.rstrip()
            yield line
