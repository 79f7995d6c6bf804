# SPDX-License-Identifier: Apache-2.0
"""A page of markdown that is never longer than a limit."""

import re
from collections.abc import Iterable

from lossgate.reports.plain import one_line

_LEFT_OUT = "- {} more are left out here, because a comment can't be longer\n"
_CUT = "\nThis comment can't be longer; what is left out is in the output of `lossgate gate`.\n"
_LARGEST = 10**9


class Page:
    """Markdown that grows in whole items as long as it is not longer than a limit.

    Args:
        limit: the most characters, counted as JavaScript and GitHub do: an emoji counts two.
    """

    def __init__(self, limit: int) -> None:
        self._parts: list[str] = []
        self._room = limit - _length(_CUT)
        self._cut = False

    def must(self, text: str) -> None:
        """Adds what no page can do without."""
        self._add(text)

    def section(self, opening: str, items: Iterable[str], closing: str) -> None:
        """Adds a section with as many of its items as fit, and says how many do not.

        A section without items is left out.
        """
        whole = list(items)
        if not whole:
            return
        ends = _length(opening) + _length(closing) + _length(_LEFT_OUT.format(_LARGEST))
        if ends + _length(whole[0]) > self._room:
            self._cut = True
            return
        self._add(opening)
        left = self._fill(whole, _length(closing) + _length(_LEFT_OUT.format(_LARGEST)))
        if left:
            self._cut = True
            self._add(_LEFT_OUT.format(left))
        self._add(closing)

    def _fill(self, items: list[str], reserved: int) -> int:
        """Adds items while there is room, and returns how many have none."""
        for number, item in enumerate(items):
            if _length(item) + reserved > self._room:
                return len(items) - number
            self._add(item)
        return 0

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self._room -= _length(text)

    def text(self) -> str:
        return "".join(self._parts) + (_CUT if self._cut else "")


def _length(text: str) -> int:
    return len(text) + sum(char > "\uffff" for char in text)


def code(text: str) -> str:
    """Returns text as a code span, whatever is in it."""
    line = one_line(text) or " "
    fence = "`" * (_longest_run(line) + 1)
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{space}{line}{space}{fence}"


def code_block(text: str, language: str) -> str:
    """Returns text as a fenced code block of one line."""
    line = one_line(text)
    fence = "`" * max(3, _longest_run(line) + 1)
    return f"{fence}{language}\n{line}\n{fence}\n"


def _longest_run(line: str) -> int:
    return max(map(len, re.findall("`+", line)), default=0)
