# SPDX-License-Identifier: Apache-2.0
"""Finds the cells of evidence that a rule of a policy asks for."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from msgspec.structs import astuple

from lossgate.engine.cell_record import CellKey

Patterns = tuple[str, ...]
Rest = tuple[str, str, str, str, str]
"""Property, layout, dtype, world and device of a cell, or a pattern for each."""

_PARTS = ("property", "layout", "dtype", "world", "device")
_USUAL = {"world": "simulated", "device": "cpu"}
_WILDCARDS = re.compile(r"[*?[]")
_ESCAPED = re.compile(r"\[([*?[])\]")
_REMEMBERED = 2**16
"""How many answers a function remembers. Apart from candidates, names and patterns are few."""


@lru_cache(_REMEMBERED)
def literal(pattern: str) -> str | None:
    """Returns the one name that a pattern stands for, or None if it has wildcards.

    ``[*]``, ``[?]`` and ``[[]`` stand for the character between the brackets.
    """
    return None if _WILDCARDS.search(_ESCAPED.sub("", pattern)) else _ESCAPED.sub(r"\1", pattern)


def escape(name: str) -> str:
    """Returns the pattern that stands for a name alone."""
    return _WILDCARDS.sub(lambda found: f"[{found.group()}]", name)


@lru_cache(_REMEMBERED)
def any_fits(patterns: Patterns, name: str) -> bool:
    """Returns whether one of several shell patterns matches a name."""
    return any(fits(pattern, name) for pattern in patterns)


@lru_cache(_REMEMBERED)
def fits(pattern: str, name: str) -> bool:
    """Returns whether a shell pattern matches a name. Case matters on every system."""
    return fnmatchcase(name, pattern)


class Demand(NamedTuple):
    """What a rule asks for: at least one cell of a candidate that matches five patterns."""

    pattern: str
    """The pattern of the candidate, as the policy has it."""
    candidate: str | None
    """The candidate, or None if there is none that matches the pattern."""
    wanted: Rest
    """The patterns for the other parts; the first combination if there is no candidate."""
    cells: tuple[CellKey, ...]
    """The cells that meet the demand; none if it is not met."""

    @property
    def is_met(self) -> bool:
        return bool(self.cells)

    @property
    def key(self) -> CellKey | None:
        """The cell that is asked for, if the rule names each of its parts."""
        parts = [literal(pattern) for pattern in self.wanted]
        names = [part for part in parts if part is not None]
        if self.candidate is None or literal(self.pattern) is None or len(names) < len(parts):
            return None
        return CellKey(self.candidate, *names)

    def __str__(self) -> str:
        if self.candidate is None:
            return f"no candidate matches {self.pattern}"
        named = {name: pattern for name, pattern in zip(_PARTS, self.wanted, strict=True) if pattern != "*"}
        shown = {name: pattern for name, pattern in named.items() if _USUAL.get(name) != pattern} or named
        if not shown:
            return f"{self.candidate}: no cell"
        return f"{self.candidate}: no cell with {', '.join(f'{name} {pattern}' for name, pattern in shown.items())}"


class KnownCells:
    """The cells of the evidence, by candidate. One object serves all rules."""

    def __init__(self, keys: Iterable[CellKey]) -> None:
        self.by_candidate: defaultdict[str, list[tuple[CellKey, Rest]]] = defaultdict(list)
        for key in keys:
            candidate, *rest = astuple(key)
            self.by_candidate[candidate].append((key, tuple(rest)))


def demands(candidates: Patterns, others: tuple[Patterns, ...], known: KnownCells) -> Iterator[Demand]:
    """Yields the demands of a rule, each with the cells that meet it, in the order of the rule.

    A named candidate must be in the evidence, and a pattern must match at least one candidate. For
    each of these candidates, each combination of the other patterns must match at least one cell.

    Args:
        candidates: the patterns for candidates.
        others: the patterns for properties, layouts, dtypes, worlds and devices.
        known: the cells of the evidence.
    """
    asked: list[Rest] = list(product(*others))  # pyright: ignore[reportAssignmentType]
    done = set[str]()
    for pattern in candidates:
        chosen = _chosen(pattern, known)
        if not chosen:  # a pattern with wildcards: a name is chosen even if it has no cells
            yield Demand(pattern, candidate=None, wanted=asked[0], cells=())
        for candidate in chosen:
            if candidate in done:
                continue
            done.add(candidate)
            met = _met(others, known.by_candidate.get(candidate, ()))
            yield from (Demand(pattern, candidate, wanted, tuple(met.get(wanted, ()))) for wanted in asked)


def _chosen(pattern: str, known: KnownCells) -> list[str]:
    """Returns the candidates that a pattern asks for. A name may have no cells."""
    name = literal(pattern)
    if name is not None:
        return [name]
    return sorted(candidate for candidate in known.by_candidate if fits(pattern, candidate))


def _met(
    others: tuple[Patterns, ...], cells: Iterable[tuple[CellKey, Rest]]
) -> Mapping[tuple[str, ...], list[CellKey]]:
    """Returns the cells that each combination of patterns matches."""
    met: defaultdict[tuple[str, ...], list[CellKey]] = defaultdict(list)
    for key, rest in cells:
        for combination in _matching(others, rest):
            met[combination].append(key)
    return met


@lru_cache(_REMEMBERED)
def _matching(others: tuple[Patterns, ...], rest: Rest) -> Sequence[tuple[str, ...]]:
    """Returns the combinations of patterns that match a cell, whatever its candidate is."""
    each = [[p for p in patterns if fits(p, name)] for patterns, name in zip(others, rest, strict=True)]
    return list(product(*each))
