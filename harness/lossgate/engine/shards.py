# SPDX-License-Identifier: Apache-2.0
"""Splits a matrix of cells over machines: ``lossgate verify --shard 3/8``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from lossgate.adequacy.deck import deck_key
from lossgate.base.errors import UsageError
from lossgate.base.spelling import counted
from lossgate.engine.cell import Cell


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
