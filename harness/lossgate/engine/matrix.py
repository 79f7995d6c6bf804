# SPDX-License-Identifier: Apache-2.0
"""The layouts and dtypes on which a candidate is verified.

Few layouts are enough. There are 38 layouts of at most 8 ranks, and the one that splits every axis
in two shows nearly all known mistakes that any of them shows. So by default the layouts cover only
what differs: no split, each axis alone, each pair, all axes, and uneven shards. Further dtypes
change how numbers are rounded, but hardly how they are split. They get three layouts. The least is
no split and the layout that splits most axes, in one dtype.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Self
from zlib import crc32

from lossgate.adequacy.deck import deck_key
from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES, Axis, Layout, layouts_up_to
from lossgate.base.spelling import counted
from lossgate.declaration.candidate import Candidate
from lossgate.engine.cell import Cell
from lossgate.engine.settings import Settings
from lossgate.worlds import most_ranks

_FINEST = "float32"


def layouts_and_dtypes(candidate: Candidate, settings: Settings) -> list[tuple[Layout, str]]:
    """Returns the layouts and dtypes of a candidate, dtype by dtype, with smaller layouts first."""
    dtypes = _dtypes_of(candidate, settings)
    return [(layout, dtype) for dtype in dtypes for layout in _layouts_in(candidate, settings, dtype, dtypes)]


def finest(dtypes: Sequence[str]) -> str:
    """Returns the dtype that is verified on most layouts."""
    return _FINEST if _FINEST in dtypes else dtypes[0]


def _dtypes_of(candidate: Candidate, settings: Settings) -> list[str]:
    """Returns the dtypes in which a candidate is verified."""
    if settings.matrix == "least" and not settings.dtypes:
        return [finest(candidate.dtypes)]
    return [dtype for dtype in dict.fromkeys(settings.dtypes or candidate.dtypes) if dtype in candidate.dtypes]


def _layouts_in(candidate: Candidate, settings: Settings, dtype: str, dtypes: Sequence[str]) -> list[Layout]:
    if settings.layouts:
        named = dict.fromkeys(map(Layout.parse, settings.layouts))
        return [layout for layout in named if set(layout.axes) <= set(candidate.axes)]
    possible = list(layouts_up_to(min(settings.ranks, most_ranks(settings.world)), candidate.axes))
    if settings.matrix == "full":
        return possible
    chosen = covering(possible)
    if dtype != finest(dtypes) or settings.matrix == "least":
        most_split = max(chosen, key=lambda layout: len(layout.axes))
        chosen = list(dict.fromkeys((Layout(), most_split)))
    rest = [layout for layout in possible if layout not in chosen]
    # Candidates differ in this layout, so that many candidates see many layouts.
    if rest and settings.matrix != "least":
        chosen.append(rest[crc32(f"{candidate.name} {dtype} {settings.seed}".encode()) % len(rest)])
    return sorted(chosen, key=_size)


def covering(possible: Sequence[Layout]) -> list[Layout]:
    """Returns a few of the possible layouts, which cover what differs between all of them.

    They are: no split; each axis alone; each pair of axes, on 2 and 3 ranks if that is possible;
    and all axes. If no pair has 3 ranks on an axis, each axis alone on 3 ranks is added.
    """
    on_2 = [_split({axis: 2}) for axis in AXES]
    on_3 = [_split({axis: 3}) for axis in AXES]
    pairs = list(_pairs(possible))
    if any(3 in pair.sizes.values() for pair in pairs):
        on_3 = []
    wanted = (Layout(), *on_2, *on_3, *pairs, Layout(2, 2, 2))
    return [layout for layout in wanted if layout in possible]


def _pairs(possible: Sequence[Layout]) -> Iterator[Layout]:
    """Yields one layout for each pair of axes: 3 ranks on one axis and 2 on the other, or 2 on both
    if that is not possible. Over all pairs, each axis has 3 ranks once.
    """
    for one, other in combinations(AXES, 2):
        # Axes with 3 ranks: cp in dp-cp, dp in dp-tp, tp in cp-tp.
        three, two = (one, other) if (one, other) == ("dp", "tp") else (other, one)
        uneven, even = _split({two: 2, three: 3}), _split({one: 2, other: 2})
        yield uneven if uneven in possible else even


def _split(sizes: dict[Axis, int]) -> Layout:
    return Layout(**sizes)


def _size(layout: Layout) -> tuple[int, Layout]:
    return layout.ranks, layout


@dataclass(frozen=True)
class Shard:
    """One of several even parts of a matrix of cells."""

    number: int
    """From 1 on."""
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``3/8``.

        Raises:
            UsageError: if the text names no part.
        """
        number, _, of = text.partition("/")
        if not re.fullmatch(r"[1-9]\d{0,8}/[1-9]\d{0,8}", text, re.ASCII) or int(number) > int(of):
            raise UsageError(f"shard {text!r}: expected a part and the number of parts, such as 3/8, from 1/8 to 8/8")
        return cls(int(number), int(of))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def take(self, cells: Sequence[Cell]) -> list[Cell]:
        """Returns the cells of this part, in their order.

        The parts depend only on the cells, so they are the same on every machine. Their sizes
        differ by one at most. Cells that share a deck stay together as far as possible, so that few
        machines draw the same deck.

        Raises:
            UsageError: if there are more parts than cells.
        """
        if self.of > len(cells):
            raise UsageError(
                f"shard {self}: the matrix has only {counted(len(cells), 'cell')}; "
                f"use at most {counted(len(cells), 'part')}"
            )
        numbers_by_deck: dict[str, list[int]] = {}
        for number, cell in enumerate(cells):
            numbers_by_deck.setdefault(deck_key(cell.candidate, cell.dtype), []).append(number)
        numbers = [number for of_deck in numbers_by_deck.values() for number in of_deck]
        start = (self.number - 1) * len(cells) // self.of
        end = self.number * len(cells) // self.of
        return [cells[number] for number in sorted(numbers[start:end])]
