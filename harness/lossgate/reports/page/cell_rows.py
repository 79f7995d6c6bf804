# SPDX-License-Identifier: Apache-2.0
"""Puts the cells of a page into a matrix: rows of candidates, properties and dtypes, and columns of
layouts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from re import findall

from lossgate.reports.page.entries import Entry


@dataclass(frozen=True, kw_only=True)
class Row:
    """The cells of a candidate that differ only in their layout."""

    property: str
    dtype: str
    where: str
    """The world and device; empty for simulated ranks on the CPU."""
    cells: Sequence[int | None]
    """The number of the entry for each layout; None if there is no such cell."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of a candidate."""

    candidate: str
    about: str
    """The spec and head of the candidate; empty if they are unknown."""
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All cells of a page."""

    layouts: Sequence[str]
    groups: Sequence[Group]


def matrix_of(entries: Sequence[Entry]) -> Matrix:
    """Returns the matrix of entries. The entries must be in the order of their keys."""
    layouts = sorted({entry.key.layout for entry in entries}, key=_by_size)
    column = {layout: number for number, layout in enumerate(layouts)}
    groups = groupby(enumerate(entries), key=lambda numbered: numbered[1].key.candidate)
    return Matrix(layouts=layouts, groups=[_group(name, list(cells), column) for name, cells in groups])


def _by_size(layout: str) -> tuple[int, int, str]:
    """A key that sorts layouts by their ranks, then by the number of their axes."""
    sizes = [int(size) for size in findall(r"=(\d{1,9})", layout)]
    return prod(sizes), len(sizes), layout


def _group(candidate: str, cells: Sequence[tuple[int, Entry]], column: Mapping[str, int]) -> Group:
    abouts = dict.fromkeys(entry.spec for _, entry in cells if entry.spec)
    return Group(candidate=candidate, about="; ".join(abouts), rows=list(_rows(cells, column)))


def _rows(cells: Iterable[tuple[int, Entry]], column: Mapping[str, int]) -> Iterator[Row]:
    rows: dict[tuple[str, str, str], list[int | None]] = {}
    for number, entry in cells:
        key = entry.key
        row = rows.setdefault((key.property, key.dtype, key.place), [None] * len(column))
        row[column[key.layout]] = number
    for (property_, dtype, place), numbers in sorted(rows.items()):
        yield Row(property=property_, dtype=dtype, where=place, cells=numbers)
