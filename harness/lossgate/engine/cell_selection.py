# SPDX-License-Identifier: Apache-2.0
"""Chooses cells by name: ``lossgate verify -k EXPRESSION``."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lossgate.base.errors import UsageError
from lossgate.engine.cell import Cell

_TOKEN = re.compile(r"\s*([()]|[^\s()]+)")
_WORDS = ("and", "or", "not")


@dataclass(frozen=True)
class Selection:
    """An expression over the names of cells, like those of pytest: ``bfloat16 and not dp``.

    A word matches a cell if the name of the cell contains it. An example of a name is
    ``my_kernel[agreement-cp=2-float32]``.
    """

    text: str

    def __post_init__(self) -> None:
        self.matches("")  # raises if the expression is wrong

    def take(self, cells: Sequence[Cell]) -> list[Cell]:
        """Returns the cells whose names match.

        Raises:
            UsageError: if no cell matches.
        """
        chosen = [cell for cell in cells if self.matches(str(cell))]
        if not chosen:
            raise UsageError(
                f"-k {self.text!r}: no cell has such a name; the {len(cells)} cells have names such as {cells[0]}"
            )
        return chosen

    def matches(self, name: str) -> bool:
        """Returns whether a name matches. Upper and lower case are the same.

        Raises:
            UsageError: if the expression is wrong.
        """
        tokens = _TOKEN.findall(self.text)
        value, rest = self._joined("or", tokens, name.lower())
        if rest:
            raise self._error(rest[0])
        return value

    def _joined(self, word: str, tokens: list[str], name: str) -> tuple[bool, list[str]]:
        """Returns the value of terms that are joined by "or" or "and", and the tokens after them.

        "and" binds tighter: the terms between "or" may be joined by "and".
        """

        def term(tokens: list[str]) -> tuple[bool, list[str]]:
            return self._joined("and", tokens, name) if word == "or" else self._one(tokens, name)

        value, rest = term(tokens)
        while rest and rest[0] == word:
            other, rest = term(rest[1:])
            value = (value or other) if word == "or" else (value and other)
        return value, rest

    def _one(self, tokens: list[str], name: str) -> tuple[bool, list[str]]:
        """Returns the value of a word, a negation or parentheses, and the tokens after them."""
        if not tokens:
            raise self._error("the end")
        first, *rest = tokens
        if first == "not":
            value, rest = self._one(rest, name)
            return not value, rest
        if first == "(":
            value, rest = self._joined("or", rest, name)
            if not rest or rest[0] != ")":
                raise self._error(rest[0] if rest else "the end")
            return value, rest[1:]
        if first == ")" or first in _WORDS:
            raise self._error(first)
        return first.lower() in name, rest

    def _error(self, at: str) -> UsageError:
        where = at if at == "the end" else repr(at)
        return UsageError(
            f"-k {self.text!r}: can't be read at {where}; expected parts of names with 'and', 'or', 'not' and "
            "parentheses, such as 'bfloat16 and not dp'"
        )
