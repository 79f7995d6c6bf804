# SPDX-License-Identifier: Apache-2.0
"""Puts the cells of a page into a matrix: candidates, properties and dtypes by layouts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from re import findall

from lossgate.engine.cell_record import CellKey
from lossgate.reports.page.entries import Entry


@dataclass(frozen=True, kw_only=True)
class Row:
    """The cells of a candidate that differ in their layout alone."""

    property: str
    dtype: str
    where: str
    """The world and device; empty for the usual one."""
    cells: Sequence[int | None]
    """For each layout the number of the entry; None if there is no such cell."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of a candidate."""

    candidate: str
    about: str
    """Its spec and head, if they are known."""
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All cells of a page."""

    layouts: Sequence[str]
    groups: Sequence[Group]


def where(key: CellKey) -> str:
    """Returns the world and device of a cell; empty for simulated ranks on the CPU."""
    return "" if (key.world, key.device) == ("simulated", "cpu") else f"{key.world}/{key.device}"


def matrix_of(entries: Sequence[Entry]) -> Matrix:
    """Returns the matrix of entries, which are in the order of their keys."""
    layouts = sorted({entry.key.layout for entry in entries}, key=_by_size)
    column = {layout: number for number, layout in enumerate(layouts)}
    groups = groupby(enumerate(entries), key=lambda numbered: numbered[1].key.candidate)
    return Matrix(layouts=layouts, groups=[_group(name, list(cells), column) for name, cells in groups])


def _by_size(layout: str) -> tuple[int, int, str]:
    """Sorts a layout by its ranks, then by its axes."""
    sizes = [int(size) for size in findall(r"=(\d{1,9})", layout)]
    return prod(sizes), len(sizes), layout


def _group(candidate: str, cells: Sequence[tuple[int, Entry]], column: Mapping[str, int]) -> Group:
    abouts = dict.fromkeys(entry.spec for _, entry in cells if entry.spec)
    return Group(candidate=candidate, about="; ".join(abouts), rows=list(_rows(cells, column)))


def _rows(cells: Iterable[tuple[int, Entry]], column: Mapping[str, int]) -> Iterator[Row]:
    rows: dict[tuple[str, str, str], list[int | None]] = {}
    for number, entry in cells:
        name = (entry.key.property, entry.key.dtype, where(entry.key))
        rows.setdefault(name, [None] * len(column))[column[entry.key.layout]] = number
    for (property_, dtype, place), numbers in sorted(rows.items()):
        yield Row(property=property_, dtype=dtype, where=place, cells=numbers)
