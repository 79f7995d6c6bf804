# SPDX-License-Identifier: Apache-2.0
"""Writes a set of cells as few products of lists."""

from collections import defaultdict
from collections.abc import Collection, Iterator

Tuples = frozenset[tuple[str, ...]]
Box = tuple[tuple[str, ...], ...]
"""A list of names for each part of a cell. It stands for every combination of them."""


def boxes(cells: Collection[tuple[str, ...]]) -> list[Box]:
    """Returns boxes that have no cell in common, and together exactly the given cells.

    Names of the first part that go with the same combinations of the others share a box; and so on
    for the next part. A full product is one box. All names are sorted.
    """
    return sorted(_boxes(frozenset(cells)))


def _boxes(cells: Tuples) -> Iterator[Box]:
    if () in cells:
        yield ()
        return
    tails: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for first, *rest in cells:
        tails[first].add(tuple(rest))
    sharing: defaultdict[Tuples, list[str]] = defaultdict(list)
    for first, own in tails.items():
        sharing[frozenset(own)].append(first)
    for own, names in sharing.items():
        for box in _boxes(own):
            yield tuple(sorted(names)), *box
