# SPDX-License-Identifier: Apache-2.0
"""Shows what kernels print, warnings among it: each line once."""

from collections import Counter

from lossgate.base.spelling import counted
from lossgate.reports.printable import printable

_SHOWN = 10
"""The most lines that are shown of a candidate."""


class PrintedLines:
    """Remembers what each candidate has printed, so that each line is shown once.

    Args:
        whole: all lines are shown, however many there are.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._seen: dict[str, set[str]] = {}

    def new(self, candidate: str, text: str) -> list[str]:
        """Returns what to show of what a candidate has printed in a cell, a heading first; nothing
        if all of it was shown before.
        """
        printed = Counter(line for line in text.splitlines() if line.strip())
        seen = self._seen.setdefault(candidate, set())
        new = [line for line in printed if line not in seen]
        room = len(new) if self._whole else max(_SHOWN - len(seen), 0)
        seen.update(new)
        shown, more = new[:room], len(new) - room
        if not shown:
            return []
        lines = [f"  {candidate} printed {counted(printed.total(), 'line')}; each is shown once:"]
        lines += [f"    {printable(line)}" for line in shown]
        return lines + [f"    and {counted(more, 'other line')}; -v shows all"] * (more > 0)
