# SPDX-License-Identifier: Apache-2.0
"""Finds the lines of keys in a TOML text. ``tomllib`` reads the values, and tells no positions."""

import re
import tomllib
from bisect import bisect_right
from collections import Counter
from contextlib import suppress

Keys = tuple[str | int, ...]
"""The way to a value: ``("require", 0, "max_mde")``."""

_MOST_DOTS = 100
"""A longer key is no key of ours, and the ways to its parts would take quadratic memory."""
_BLANK = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_SCALAR = re.compile(
    r'''"""(?:[^\\]|\\.)*?""""{0,2}|\'\'\'.*?\'\'\''{0,2}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^,\]}#\n"']+''',
    re.DOTALL,
)


def lines_of(text: str) -> dict[Keys, int]:
    """Returns the line of each key, of each header, and of each element of an array.

    Args:
        text: a text that ``tomllib`` can read. In others, what stands after the error is left out.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    with suppress(_Lost, tomllib.TOMLDecodeError):
        scanner.document()
    return scanner.lines


class _Lost(Exception):
    """The scanner does not know what stands here."""


class _Scanner:
    """Walks once through a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Keys, int] = {}
        self.lengths: Counter[Keys] = Counter()
        """How many elements each array of tables has so far."""
        self.starts = [0, *(newline.end() for newline in re.finditer("\n", text))]

    def document(self) -> None:
        table: Keys = ()
        while self.next():
            if self.next() == "[":
                table = self.header()
            else:
                self.pair(table)

    def header(self) -> Keys:
        """Reads ``[a.b]`` or ``[[a.b]]``, and returns the way to the table that it opens."""
        line, repeated = self.line(), self.text.startswith("[[", self.at)
        self.at += 1 + repeated
        *outer, last = self.keys()
        path: Keys = ()
        for key in outer:
            path = self.newest((*path, key))
            self.lines.setdefault(path, line)
        path = (*path, last)
        if repeated:
            self.lines.setdefault(path, line)
            self.lengths[path] += 1
        path = self.newest(path)
        self.lines[path] = line
        for _ in range(1 + repeated):
            self.take("]")
        return path

    def newest(self, path: Keys) -> Keys:
        """Returns the way to the last table so far, if the path leads to an array of tables."""
        return (*path, self.lengths[path] - 1) if path in self.lengths else path

    def pair(self, table: Keys) -> None:
        line, path = self.line(), table
        for key in self.keys():
            path = (*path, key)
            self.lines.setdefault(path, line)
        self.take("=")
        self.value(path)

    def value(self, path: Keys) -> None:
        match self.next():
            case "[":
                self.array(path)
            case "{":
                self.inline_table(path)
            case _:
                self.match(_SCALAR)

    def array(self, path: Keys) -> None:
        self.take("[")
        count = 0
        while self.next() != "]":
            self.lines[*path, count] = self.line()
            self.value((*path, count))
            count += 1
            self.skip(",")
        self.take("]")

    def inline_table(self, path: Keys) -> None:
        self.take("{")
        while self.next() != "}":
            self.pair(path)
            self.skip(",")
        self.take("}")

    def keys(self) -> list[str]:
        """Reads a key that may have dots."""
        found = [self.key()]
        while self.next() == ".":
            self.take(".")
            found.append(self.key())
        if len(found) > _MOST_DOTS:
            raise _Lost
        return found

    def key(self) -> str:
        self.next()
        key = self.match(_KEY)
        return tomllib.loads(f"key = {key}")["key"] if key[0] in "\"'" else key

    def line(self) -> int:
        return bisect_right(self.starts, self.at)

    def next(self) -> str:
        """Steps over blanks and comments, and returns the character there; "" at the end."""
        self.match(_BLANK)
        return self.text[self.at : self.at + 1]

    def take(self, character: str) -> None:
        if self.next() != character:
            raise _Lost
        self.at += 1

    def skip(self, character: str) -> None:
        if self.next() == character:
            self.at += 1

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            raise _Lost
        self.at = found.end()
        return found.group()
