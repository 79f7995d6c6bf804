# SPDX-License-Identifier: Apache-2.0
"""Describes cells and replays, line by line."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellRecord
from lossgate.reports.console import make_console, printable, printable_lines
from lossgate.reports.shown_verdict import STYLES, ShownVerdict, broken_in_words, share

NOT_DISTINGUISHED = "Not distinguished: a kernel that takes one of these choices for another would have passed."
EXEMPT = "Not held to these properties, as the candidates declare:"
CONVENTIONS = "Judged for what they still promise under these conventions, which the candidates declare:"
EXCLUDED = "Not verified, because the candidates leave out such problems:"
_NAMED = 3
"""The most candidates that are named."""


def remark_lines(heading: str, cells: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Returns a heading and a line for each remark; nothing if there are no remarks.

    Args:
        heading: the subject of the remarks.
        cells: for each cell, the name of its candidate and the remarks on it.
    """
    found: dict[str, Counter[str]] = {}
    for candidate, remarks in cells:
        for remark in remarks:
            found.setdefault(remark, Counter())[candidate] += 1
    lines = [
        f"  {remark}: {counted(count.total(), 'cell')} of {_names(list(count))}" for remark, count in found.items()
    ]
    return [heading, *lines] if lines else []


def _names(candidates: list[str]) -> str:
    left = len(candidates) - _NAMED
    if left > 0:
        return f"{', '.join(candidates[:_NAMED])} and {left} more"
    *others, last = candidates
    return f"{', '.join(others)} and {last}" if others else last


def in_pairs(declared: Mapping[str, str]) -> tuple[str, ...]:
    """Returns each thing that a candidate declares, with the reason that it gives."""
    return tuple(f"{what}: {why}" for what, why in declared.items())


_REPLAY = "  replay: "
_TO_COPY = re.compile(rf'{_REPLAY}| *File "')
"""Lines from which people copy a command or a place."""


def heading(cell: CellRecord, *, placed: bool = False) -> str:
    """Returns the verdict of a cell, its name, and which promises it breaks although its numbers
    agree, in rich markup.

    Args:
        cell: what is shown.
        placed: whether an unusual world and device are shown. In a run all cells have the same.
    """
    place = f"  on {cell.key.place}" if placed and cell.key.place else ""
    broken = f": {broken}" if (broken := broken_in_words([cell])) else ""
    return f"{marked(cell)}  {escaped(cell.candidate)}  {escaped(f'{place_of(cell)}{place}{broken}')}"


def place_of(cell: CellRecord) -> str:
    """Returns dtype and layout of a cell, after its property unless that is agreement."""
    of = "" if cell.property == "agreement" else f"{cell.property}  "
    return f"{of}{cell.dtype}  {cell.layout}"


def describe(cell: CellRecord, *, whole: bool = False) -> list[str]:
    """Returns why a cell does not agree, the cause first, in lines of rich markup.

    Args:
        cell: what is shown.
        whole: whether statistics are shown, and what the cause explains.
    """
    lines = [f"  {escape(line)}" for line in printable_lines(cell.told)]
    failure = cell.failure
    if whole:
        statistics = failure.statistics if failure is not None else ()
        explains = (cell.explains,) if cell.explains else ()
        lines += [f"  {escape(line)}" for line in printable_lines((*statistics, *explains))]
    if failure is not None:
        lines.append(f"  on: {escaped(failure.description)}{_tries(failure.shrink_calls) if whole else ''}")
    if cell.replay is not None:
        lines.append(replay_line(escaped(cell.replay)))
    return lines


def size_lines(cell: CellRecord) -> Iterator[str]:
    """Yields a line for each size of large problems: how near each output came to its limits."""
    for one in cell.large:
        if one.margins:
            width = f", H={one.hidden:,}" if one.hidden is not None else ""
            shares = ", ".join(f"{output} {share(margin)}" for output, margin in one.margins.items())
            yield f"at T={one.tokens:,}{width}, V={one.vocab:,}, as shares of the limits: {shares}"


def escaped(text: str) -> str:
    """Returns text as a line of rich markup."""
    return escape(printable(text))


def _tries(shrink_calls: int) -> str:
    if not shrink_calls:
        return ""
    tries = "1 try" if shrink_calls == 1 else f"{shrink_calls} tries"
    return f"  (after {tries} to make it smaller)"


def replay_line(command: str) -> str:
    """Returns the line that shows a command, which ``print_detail`` never wraps."""
    return f"{_REPLAY}{command}"


def marked(cell: CellRecord) -> str:
    """Returns the verdict in its colour."""
    shown = ShownVerdict.of(cell)
    return f"[{shown.style}]{escape(str(shown))}[/]"


def print_remarks(console: Console, cells: Sequence[CellRecord]) -> None:
    """Prints remarks on cells: choices that were not distinguished, properties to which they were
    not held, and problems that they were not given.
    """
    for lines in (
        remark_lines(NOT_DISTINGUISHED, ((cell.candidate, cell.not_distinguished) for cell in cells)),
        remark_lines(EXEMPT, ((cell.candidate, in_pairs(cell.exempt)) for cell in cells)),
        remark_lines(CONVENTIONS, ((cell.candidate, in_pairs(cell.conventions)) for cell in cells)),
        remark_lines(EXCLUDED, ((cell.candidate, in_pairs(cell.excluded)) for cell in cells)),
    ):
        for line in lines:
            print_detail(console, escaped(line))
        if lines:
            console.print()


def print_detail(console: Console, line: str) -> None:
    """Prints one line of a description. On a terminal it is wrapped at words, and its further parts
    are indented more than the next line.

    The replay command and places in files stay one line, because a line break in them would be
    copied, too. In a file every line stays whole, so that it can be searched.

    Args:
        console: where to print.
        line: the line in rich markup.
    """
    if not console.is_terminal or _TO_COPY.match(line):
        console.print(line, soft_wrap=True)
        return
    text = line.lstrip(" ")
    indent = len(line) - len(text)
    joined = Text.from_markup(_NOT_APART.sub(_JOINED, text))
    for number, part in enumerate(_wrapped(console, joined, indent)):
        part.plain = part.plain.replace(_JOINED, " ")
        margin = indent if number == 0 else indent + _HANGING
        console.print(Text(" " * margin) + part, soft_wrap=True)


_HANGING = 4
"""How much further the continuation of a line is indented."""
_JOINED = "\ue000"
"""Stands for a blank at which a line is not broken."""
_NOT_APART = re.compile(r"(?<=\d) (?=\+- \d|m?s\b|CPU s\b)|(?<=\+-) (?=\d)|(?<=CPU) (?=s\b)")
"""Blanks between a number and its error or unit."""


def _wrapped(console: Console, text: Text, indent: int) -> Iterator[Text]:
    """Yields the lines of a text. The first line has more room than the others."""
    first, *others = text.wrap(console, max(console.width - indent, 1))
    used = len(first.plain)
    first.rstrip()
    yield first
    if not others:
        return
    left = text.plain[used:]
    blanks = len(left) - len(left.lstrip())
    for line in text[used + blanks :].wrap(console, max(console.width - indent - _HANGING, 1)):
        line.rstrip()
        yield line


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
    """Prints the line of one of several files, unwrapped, because it has a path to copy."""
    make_console().print(_coloured(line), soft_wrap=True)


def _coloured(line: str) -> str:
    word = next((word for word in STYLES if line.startswith(f"{word} ")), None)
    return escape(line) if word is None else f"[{STYLES[word]}]{word}[/]{escape(line.removeprefix(word))}"
