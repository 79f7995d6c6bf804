# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of what users write, so that a slip is reported where it is made."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest, shown

Near = Callable[[object, Iterable[str]], str]
"""Returns how a message ends: the nearest spelling of a name, and those that are known."""


@dataclass(frozen=True)
class Argument:
    """An argument of a call. Its checks return the value, or raise ``UsageError``.

    A message begins with the call, the argument and its value, and ends with the way out:
    ``candidate(axes='dp'): expected a tuple; write axes=('dp',)``.
    """

    call: str
    """How the call begins, with its parenthesis: ``candidate(``, or ``spec('focal', ``."""
    name: str
    value: Any

    def error(self, problem: str) -> UsageError:
        """Returns the error that says what is wrong with the value."""
        return UsageError(f"{self.call}{self.name}={shown(self.value)}): {problem}")

    def item(self, key: object) -> "Argument":
        """Returns the value that a mapping has for a key."""
        return Argument(self.call, f"{self.name}[{shown(key)}]", self.value[key])

    def instance(self, kind: Any, expected: str) -> Any:
        """Checks for a type, or a union of types."""
        if not isinstance(self.value, kind):
            raise self.error(f"expected {expected}")
        return self.value

    def truth(self) -> bool:
        return self.instance(bool, "True or False")

    def words(self) -> str:
        """Checks for text that says something, and returns it in one line."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.error("expected words")
        return " ".join(self.value.split())

    def line(self, expected: str) -> str:
        """Checks for text that says something and is one line."""
        if not is_line(self.value):
            raise self.error(f"expected {expected}")
        return self.value

    def count(self, expected: str, most: float = float("inf")) -> int:
        """Checks for a positive whole number."""
        if type(self.value) is not int or not 1 <= self.value <= most:
            raise self.error(f"expected {expected}")
        return self.value

    def one_of(self, known: Iterable[str], problem: str = "", near: Near = nearest) -> Any:
        """Checks for one of some names.

        Args:
            known: these names.
            problem: what is wrong with another one, where the value does not say it.
            near: returns how the message ends.
        """
        choices = tuple(known)
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.error(f"{problem}; {near(self.value, choices)}" if problem else near(self.value, choices))
        return self.value

    def several(self, expected: str, *, split: bool = False) -> tuple[Any, ...]:
        """Returns several values as a tuple. A list is as good, or what yields them in order.

        A string is one value, for which the message shows how to write it. A set or a mapping has
        no order of values.

        Args:
            expected: what the values are.
            split: whether a string may hold several, separated by commas or blanks.
        """
        given = self.value
        if isinstance(given, str) and given.strip():  # it would be read letter by letter
            parts = tuple(part for part in re.split(r"[,\s]+", given) if part) if split else (given,)
            raise self.error(f"expected a tuple; write {self.name}={shown(parts)}")
        if isinstance(given, set | frozenset) and given:
            raise self.error(f"a set has no order; write {self.name}={shown(tuple(sorted(given, key=repr)))}")
        if isinstance(given, str | bytes | set | frozenset | Mapping) or not isinstance(given, Iterable):
            raise self.error(f"expected a tuple of {expected}")
        return tuple[Any, ...](given)

    def names(
        self, known: Iterable[str], unknown: str, *, near: Near = nearest, needed: bool = False
    ) -> tuple[Any, ...]:
        """Returns a tuple of names, each of them known and none twice.

        Args:
            known: the names that there are.
            unknown: what is wrong with another one, to be read before it.
            near: returns how the message ends.
            needed: whether there must be one at least.
        """
        choices = tuple(known)  # it may be an iterator, and is read for each name
        names = self.several(", ".join(choices), split=True)
        for name in names:
            self.known(name, choices, unknown, near)
            if names.count(name) > 1:
                raise self.error(f"{name!r} is named twice; name it once")
        if needed and not names:
            raise self.error(f"expected at least one of {', '.join(choices)}")
        return names

    def mapping(self, example: str, known: Iterable[str] | None = None, unknown: str = "") -> dict[Any, Any]:
        """Returns a mapping; an empty one for None.

        Args:
            example: one that is right.
            known: the names that its keys may be; None for any.
            unknown: what is wrong with another one, to be read before it.
        """
        if self.value is None:
            return {}
        given: Mapping[Any, Any] = self.instance(Mapping, f"a mapping, such as {example}")
        if known is not None:
            choices = tuple(known)
            for name in given:
                self.known(name, choices, unknown)
        return dict(given)

    def items(self) -> "Iterator[tuple[Any, Argument]]":
        """Yields the keys of a mapping, each with its value; nothing for None."""
        for key in self.value or ():
            yield key, self.item(key)

    def known(self, name: object, choices: Iterable[str], unknown: str, near: Near = nearest) -> None:
        """Checks that a name within the value is known."""
        choices = tuple(choices)
        if not isinstance(name, str) or name not in choices:
            raise self.error(f"{unknown} {shown(name)}; {near(name, choices)}")

    def function(self, *takes: str) -> Any:
        """Checks for a function that can be called with so many positional arguments.

        Args:
            takes: the names of what it will be called with.
        """
        expected = f"expected a function of {', '.join(takes)}"
        if not callable(self.value):
            raise self.error(expected)
        try:
            inspect.signature(self.value).bind(*takes)
        except TypeError as error:
            raise self.error(f"it can't be called as it will be ({error}); {expected}") from None
        except ValueError:
            pass  # a function of C has no signature
        return self.value


Arguments = Mapping[str, Argument]
"""The arguments of a call, by name."""


def arguments(call: str, given: Mapping[str, Any]) -> dict[str, Argument]:
    """Returns the arguments of a call by name.

    Args:
        call: how the call begins, with its parenthesis.
        given: the values, such as ``locals()`` where a function begins.
    """
    return {name: Argument(call, name, value) for name, value in given.items()}


def is_line(text: Any) -> bool:
    """Returns whether something is text in one line that says something."""
    return isinstance(text, str) and text.strip() != "" and text.isprintable()
