# SPDX-License-Identifier: Apache-2.0
"""Says once for many cells what was not seen in them, and what they were not held to."""

from collections import Counter
from collections.abc import Iterable

from lossgate.base.spelling import counted

NOT_DISTINGUISHED = "Not distinguished: a kernel that takes one of these choices for another would have passed."
EXEMPT = "Not held to these properties, as the candidates declare:"
EXCLUDED = "Not verified, because the candidates declare that they are never given such problems:"
_NAMED = 3
"""Candidates that are named."""


def remark_lines(heading: str, cells: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Returns a heading and one line for the same remark on many cells; nothing if there are none.

    Args:
        heading: what the remarks are about.
        cells: the name of each cell's candidate, and the remarks on it.
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
    return " and ".join(filter(None, [", ".join(candidates[:-1]), candidates[-1]]))
