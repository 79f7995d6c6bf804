# SPDX-License-Identifier: Apache-2.0
"""The verdict table. It shows the verdicts at every width of the console."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Self

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import measure_renderables
from rich.table import Column, Table
from rich.text import Text

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellRecord, Outcome
from lossgate.reports.console import printable
from lossgate.reports.shown_verdict import (
    KNOWN_STYLE,
    STYLES,
    ShownVerdict,
    broken_in_words,
    broken_names,
    percent,
    share,
)

_MARK = " <--"
"""Marks a disagreement in the table, because AGREE and DISAGREE look alike without colours."""
_GAP = 2
"""Columns of the console between two columns of the table."""
_READABLE_NAME = 24
"""Names are folded down to this width before dtype and layouts share a column."""
_SHORTEST_NAME = 8
"""Names are folded down to this width before the numbers are dropped."""
_READABLE_TEXT = 20
"""``good for`` is shown only if it can have this width. A narrower one makes very tall rows."""
_NOTHING = "-"
"""Stands where there is nothing to say."""
_CAPTION = (
    "'worst / limit': the largest statistic of any comparison, divided by its limit. Above 1 a comparison disagrees.\n"
    "'detects': from this size on, an error in the scale of any output would have been found in every cell of the row "
    "that does not disagree. It is in percent, or a fraction if it has no % sign. 'nothing': an error of 100% could "
    "have stayed hidden."
)


_IN_NOTE = r"(?<= )(?=\()|(?<=, )"
"""Verdicts may be broken before the name of a known failure, and before that of each promise."""
_IN_LAYOUTS = r"(?<=up to )|(?<=,)(?=\w)"
"""Layouts may be broken after "up to" and between axes."""


def verdict_table(cells: Iterable[CellRecord], *, placed: bool = False, glossary: bool = False) -> "VerdictTable":
    """Makes the table with a row for each candidate, property, dtype and place, over all layouts.

    Args:
        cells: what is shown.
        placed: whether an unusual world and device is part of the name.
        glossary: whether the columns are explained below the table.

    Returns:
        A table for ``rich``. It chooses its columns by the width of the console that prints it.
    """
    return VerdictTable([_Row.of(group, placed=placed) for group in rows_of(cells)], glossary=glossary)


def rows_of(cells: Iterable[CellRecord]) -> list[list[CellRecord]]:
    """Returns the cells of each row of the table."""
    groups: dict[tuple[str, ...], list[CellRecord]] = {}
    for cell in cells:
        groups.setdefault((cell.candidate, cell.source, cell.property, cell.dtype, cell.key.place), []).append(cell)
    return list(groups.values())


def summary(
    cells: Sequence[CellRecord], seconds: float | None = None, *, asked: float = 0.0, numbers_only: bool = False
) -> str:
    """Counts the cells by verdict, and names the promises that are broken, in one line.

    Args:
        cells: all of them.
        seconds: how long they took together, on the clock; None if nobody measured that.
        asked: the CPU seconds that it took to ask which known mistakes would show; 0 is left out.
        numbers_only: whether broken promises do not count.
    """
    counts = Counter("known failure" if cell.expected else cell.outcome for cell in cells)
    words = [f"{count} {word}" for word, count in sorted(counts.items())]
    uncounted = "; only numbers count" if numbers_only else ""
    broken = f" ({broken}{uncounted})" if (broken := broken_in_words(cells)) else ""
    verdicts = ", ".join(words) + broken or "nothing was verified"
    took = f"; {seconds:.0f} s" if seconds is not None else ""
    price = f"; asking which known mistakes would show took {asked:.1f} CPU s" if asked else ""
    return f"{counted(len(cells), 'cell')}: {verdicts}{took}{price}"


def coloured_summary(text: str) -> Text:
    """Colours the verdicts in a summary, because the last line of a screen must be noticed."""
    coloured = Text(text)
    for word, style in STYLES.items():
        coloured.highlight_regex(rf"\b\d+ {word}\b", style)
    coloured.highlight_regex(r"\b\d+ known failure\b", KNOWN_STYLE)
    return coloured


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The texts and numbers of a row of the table."""

    name: str
    verdicts: tuple[tuple[int, ShownVerdict], ...]
    """The number of cells with each verdict, the worst verdict first."""
    broken: str
    """The promises that are broken; "" if the row is of the only one."""
    dtype: str
    layouts: str
    worst: str
    detects: str
    problems: int
    comparisons: int
    good_for: str

    @classmethod
    def of(cls, cells: Sequence[CellRecord], *, placed: bool) -> Self:
        """Makes the row of the cells of one candidate, property, dtype and place."""
        cell = cells[0]
        counts = Counter(map(ShownVerdict.of, cells))
        margins = [cell.margin for cell in cells if cell.comparisons]
        effects = [cell.mde for cell in cells if cell.expected or cell.outcome is not Outcome.DISAGREE]
        name = cell.candidate if cell.property == "agreement" else f"{cell.candidate} {cell.property}"
        return cls(
            name=printable(f"{name} on {cell.key.place}" if placed and cell.key.place else name),
            verdicts=tuple((counts[shown], shown) for shown in sorted(counts, key=lambda shown: shown.order)),
            broken=broken_names(cells) if cell.property == "agreement" else "",
            dtype=printable(cell.dtype),
            layouts=_layouts(cells),
            worst=share(_largest(margins)) if margins else _NOTHING,
            detects=percent(_largest(effects)) if effects else _NOTHING,
            problems=sum(cell.problems for cell in cells),
            comparisons=sum(cell.comparisons for cell in cells),
            good_for=printable(cell.good_for),
        )

    @property
    def candidate(self) -> Text:
        return Text(self.name, style=STYLES[self.verdicts[0][1].word] if self.wrong else "")

    @property
    def wrong(self) -> bool:
        return any(shown.wrong for _, shown in self.verdicts)

    def verdict(self, *, notes: bool) -> Text:
        """Makes one line for each verdict, with the number of its cells if there are several."""
        lines: list[Text] = []
        for count, shown in self.verdicts:
            number = f"{count} x " if len(self.verdicts) > 1 else ""
            mark = _MARK if shown.wrong and shown.word is Outcome.DISAGREE else ""
            breaks = self.broken if shown.wrong and shown.word is Outcome.PROMISE_BROKEN else ""
            said = f"({breaks})" if breaks else shown.note
            note = f" {said}" if notes and said else ""
            lines.append(Text(f"{number}{shown.word}{mark}{note}", shown.style))
        return Text("\n").join(lines)


def _largest(numbers: Sequence[float | None]) -> float:
    """Returns the largest number. None is infinite."""
    return max(inf if number is None else number for number in numbers)


def _layouts(cells: Sequence[CellRecord]) -> str:
    if len(cells) == 1:
        return printable(cells[0].layout)
    most = max(_ranks(cell.layout) for cell in cells)
    return f"{len(cells)}, up to {counted(most, 'rank')}"


def _ranks(layout: str) -> int:
    """Returns the number of ranks of a layout; 1 if only a later version of lossgate knows it."""
    try:
        return Layout.parse(layout).ranks
    except UsageError:
        return 1


@dataclass(frozen=True)
class _Column:
    """A column of the table."""

    heading: str
    cells: Sequence[Text]
    least: int | None = None
    """Its smallest width; None for the width of its whole text."""
    breaks: str = r"(?<= )"
    """A pattern of the places at which a line may be broken if it is too long."""
    right: bool = False
    """Whether it is aligned to the right."""

    def folded(self, width: int) -> list[Text]:
        return [_fold(cell, width, self.breaks) for cell in self.cells]


def _fold(text: Text, width: int, breaks: str) -> Text:
    """Breaks lines that are wider than ``width`` at places that match, as late as possible."""
    lines: list[Text] = []
    for line in text.split("\n"):
        lines.append(Text())
        is_too_wide = line.cell_len > width
        places = [match.start() for match in re.finditer(breaks, line.plain)] if is_too_wide else []
        for piece in line.divide(places):
            fits = lines[-1].cell_len + cell_len(piece.plain.rstrip()) <= width
            if lines[-1] and not fits:
                lines.append(Text())
            lines[-1].append_text(piece)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


class VerdictTable:
    """The verdicts as a table that fits the console.

    As the console narrows, ``good for`` is dropped first, then ``comparisons``, then ``problems``.
    Then the names are folded and the layouts wrapped. Then dtype and layouts share a column. Below
    a width of 60, the other numbers may be dropped, too.
    """

    def __init__(self, rows: Sequence[_Row], *, glossary: bool = False) -> None:
        self._rows, self._glossary = rows, glossary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns, widths = self._fitting(console, options)
        table = Table(
            *(
                Column(column.heading, justify="right" if column.right else "left", overflow="fold", width=width)
                for column, width in zip(columns, widths, strict=True)
            ),
            title="Verdicts",
            title_justify="left",
            title_style="bold",
            box=SIMPLE,
            show_edge=False,
            pad_edge=False,
            padding=(0, _GAP - 1, 0, 0),  # the box puts one more space between columns
        )
        folded = [column.folded(width) for column, width in zip(columns, widths, strict=True)]
        for cells in zip(*folded, strict=True):
            table.add_row(*cells)
        yield ""
        yield table
        yield Text(f"\n{_CAPTION}\n", style="dim") if self._glossary else ""

    def _fitting(self, console: Console, options: ConsoleOptions) -> tuple[list[_Column], list[int]]:
        """Returns the first choice of columns that fits, or else the last, and their widths."""
        columns: list[_Column] = []
        widths: list[int] = []
        for columns in self._choices(console, options):
            room = options.max_width - _GAP * (len(columns) - 1)
            whole = [_width(console, options, Text(column.heading), *column.cells) for column in columns]
            least = [
                width if column.least is None else min(column.least, width)
                for column, width in zip(columns, whole, strict=True)
            ]
            widths = _share_room(room, least, whole)
            if sum(least) <= room:
                break
        return columns, widths

    def _choices(self, console: Console, options: ConsoleOptions) -> Iterator[list[_Column]]:
        """Yields the sets of columns to try, from the most detailed to the least."""
        rows = self._rows
        candidate = partial(_Column, "candidate", [row.candidate for row in rows], breaks=r"(?<=[\s_.-])")
        verdict = partial(_Column, "verdict", [row.verdict(notes=True) for row in rows], breaks=_IN_NOTE)
        dtype = _Column("dtype", [Text(row.dtype) for row in rows])
        layouts = partial(_Column, "layouts", [Text(row.layouts) for row in rows], breaks=_IN_LAYOUTS)
        figures = [
            _Column("worst /\nlimit", [Text(row.worst) for row in rows], right=True),
            _Column("detects", [Text(row.detects) for row in rows], right=True),
        ]
        problems = _Column("problems", [Text(str(row.problems)) for row in rows], right=True)
        comparisons = _Column("comparisons", [Text(str(row.comparisons)) for row in rows], right=True)
        good_for = _Column("good for", [Text(row.good_for) for row in rows], least=_READABLE_TEXT)

        heading = Text("verdict")
        without_notes = [row.verdict(notes=False) for row in rows]
        two_lines = _width(console, options, heading, *verdict().folded(0))
        always = [candidate(), verdict(least=two_lines), dtype, layouts(), *figures]
        if any(row.good_for for row in rows):
            yield [*always, problems, comparisons, good_for]
        yield [*always, problems, comparisons]
        yield [*always, problems]
        yield always

        least = _width(console, options, Text("layouts"), *layouts().folded(0))
        folded = [candidate(least=_READABLE_NAME), verdict(least=two_lines), dtype, layouts(least=least), *figures]
        yield folded
        both = [Text(f"{row.dtype}\n{row.layouts}") for row in rows]
        least = _width(console, options, *_Column("", both, breaks=_IN_LAYOUTS).folded(0))
        shared = _Column("dtype,\nlayouts", both, least=least, breaks=_IN_LAYOUTS)
        one_line = _width(console, options, heading, *without_notes)
        yield [candidate(least=_SHORTEST_NAME), verdict(least=one_line), shared, *figures]
        yield [candidate(least=1), verdict(least=one_line), shared]


def _width(console: Console, options: ConsoleOptions, *texts: Text) -> int:
    """Returns the width of the longest line of all texts."""
    return measure_renderables(console, options, texts).maximum


def _share_room(room: int, least: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Gives each column its least width, and the rest of the room to the columns from the left."""
    spare = room - sum(least)
    widths: list[int] = []
    for low, high in zip(least, whole, strict=True):
        more = max(0, min(spare, high - low))
        spare -= more
        widths.append(low + more)
    return widths
