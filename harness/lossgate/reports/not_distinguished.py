# SPDX-License-Identifier: Apache-2.0
"""Says once for many cells which choices of options no problem distinguished."""

from collections import Counter
from collections.abc import Iterable

from lossgate.reports.counted import counted

HEADING = "Not distinguished: a kernel that takes one of these choices for another would have passed."
_NAMED = 3
"""Candidates that are named."""


def not_distinguished_lines(cells: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Returns a heading and one line for the same choices in many cells; nothing if there are none.

    Args:
        cells: the name of each cell's candidate, and the choices that were not distinguished in it.
    """
    found: dict[str, Counter[str]] = {}
    for candidate, choices in cells:
        for choice in choices:
            found.setdefault(choice, Counter())[candidate] += 1
    lines = [
        f"  {choice}: {counted(count.total(), 'cell')} of {_names(list(count))}" for choice, count in found.items()
    ]
    return [HEADING, *lines] if lines else []


def _names(candidates: list[str]) -> str:
    left = len(candidates) - _NAMED
    if left > 0:
        return f"{', '.join(candidates[:_NAMED])} and {left} more"
    return " and ".join(filter(None, [", ".join(candidates[:-1]), candidates[-1]]))
