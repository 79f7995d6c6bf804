# SPDX-License-Identifier: Apache-2.0
"""Shows remarks on cells. A remark that many cells have in common is shown once."""

from collections import Counter
from collections.abc import Iterable, Mapping

from lossgate.base.spelling import counted

NOT_DISTINGUISHED = "Not distinguished: a kernel that takes one of these choices for another would have passed."
EXEMPT = "Not held to these properties, as the candidates declare:"
EXCLUDED = "Not verified, because the candidates declare that they are never given such problems:"
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
