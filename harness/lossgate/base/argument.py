# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of calls that users write, so that a slip is reported where it is made."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest, shown

Near = Callable[[object, Iterable[str]], str]
"""A function that returns the end of a message: the nearest spelling of a name, and the known
names."""


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
        """Returns the entry of a mapping for a key, as an argument of its own."""
        return Argument(self.call, f"{self.name}[{shown(key)}]", self.value[key])

    def instance(self, kind: Any, expected: str) -> Any:
        """Checks that the value is of a type, or of a union of types."""
        if not isinstance(self.value, kind):
            raise self.error(f"expected {expected}")
        return self.value

    def truth(self) -> bool:
        return self.instance(bool, "True or False")

    def words(self) -> str:
        """Checks that the value is text and not blank, and returns it in one line."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.error("expected words")
        return " ".join(self.value.split())

    def line(self, expected: str) -> str:
        """Checks that the value is one line of text and not blank."""
        if not is_line(self.value):
            raise self.error(f"expected {expected}")
        return self.value

    def count(self, expected: str, most: float = float("inf")) -> int:
        """Checks that the value is a positive whole number."""
        if type(self.value) is not int or not 1 <= self.value <= most:
            raise self.error(f"expected {expected}")
        return self.value

    def one_of(self, known: Iterable[str], problem: str = "", near: Near = nearest) -> Any:
        """Checks that the value is one of some names.

        Args:
            known: these names.
            problem: the beginning of the message, if the value alone does not show what is wrong.
            near: returns the end of the message.
        """
        choices = tuple(known)
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.error(f"{problem}; {near(self.value, choices)}" if problem else near(self.value, choices))
        return self.value

    def several(self, expected: str, *, split: bool = False) -> tuple[Any, ...]:
        """Returns several values as a tuple. They may be given as a list, too, or as any iterable
        with an order.

        A set or a mapping is refused because its values have no order. A string is refused with a
        message that shows how to write it as a tuple.

        Args:
            expected: what the values are.
            split: whether this message reads the string as several values, separated by commas or
                blanks.
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
            known: the names that may be given.
            unknown: the words of the message before an unknown name, such as "unknown dtype".
            near: returns the end of the message.
            needed: whether at least one name must be given.
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
        """Returns a mapping as a dict; None gives an empty dict.

        Args:
            example: a right mapping, for the message.
            known: the names that its keys may be; None for any.
            unknown: the words of the message before an unknown key.
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
        """Yields each key of a mapping with its value as an argument; None yields nothing."""
        for key in self.value or ():
            yield key, self.item(key)

    def known(self, name: object, choices: Iterable[str], unknown: str, near: Near = nearest) -> None:
        """Checks that a name within the value is known."""
        choices = tuple(choices)
        if not isinstance(name, str) or name not in choices:
            raise self.error(f"{unknown} {shown(name)}; {near(name, choices)}")

    def function(self, *takes: str) -> Any:
        """Checks that the value is a function that takes these positional arguments.

        Args:
            takes: the names of the arguments.
        """
        expected = f"expected a function of {', '.join(takes)}"
        if not callable(self.value):
            raise self.error(expected)
        try:
            inspect.signature(self.value).bind(*takes)
        except TypeError as error:
            raise self.error(f"lossgate can't call it ({error}); {expected}") from None
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
    """Returns whether something is one line of text and not blank."""
    return isinstance(text, str) and text.strip() != "" and text.isprintable()
