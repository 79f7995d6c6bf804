# SPDX-License-Identifier: Apache-2.0
"""Parts of messages: hints for misspelt names, values in one short line, and counts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import FunctionType
from typing import TypeVar

from lossgate.base.errors import UsageError

T = TypeVar("T")

_LONGEST = 60
"""The most characters of a value that a message shows."""


def shown(value: object) -> str:
    """Returns the text that shows a value in a message: one line, which is cut in the middle if it
    is long. A class or a function is shown by its name.
    """
    if isinstance(value, type | FunctionType):
        return value.__name__
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except ValueError:  # Python does not print whole numbers of thousands of digits
        return "a number of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__}"
    except Exception:  # the __repr__ of a user's class may raise anything
        return f"a {type(value).__name__}"
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"


def nearest(name: object, known: Iterable[str], instead: str = "") -> str:
    """Returns the end of a message: the nearest known name, if one is near, and all known names.

    Args:
        name: the unknown name that was given.
        known: the known names.
        instead: a hint in place of the nearest name. Give it if the name is not misspelt, but is
            the name of something else.
    """
    choices = list(known)
    given = name if isinstance(name, str) else shown(name)
    close = [one for one in get_close_matches(given, choices, n=1) if not _is_of_other_number(given, one)]
    expected = f"expected one of {', '.join(choices)}" if choices else "there are none"
    hint = instead or (f"did you mean {close[0]!r}?" if close else "")
    return f"{hint} ({expected})" if hint else expected


def _is_of_other_number(given: str, known: str) -> bool:
    """Returns whether two names differ only in a number, such as float64 and float16. Such a name
    is no slip for the other, but digits in another order are a slip.
    """
    if re.sub(r"\d", "", given) != re.sub(r"\d", "", known):
        return False
    digits = sorted(re.findall(r"\d", given))
    return bool(digits) and digits != sorted(re.findall(r"\d", known))


def look_up(what: str, name: str, known: Mapping[str, T]) -> T:
    """Returns the thing that has a name, among all things of a kind.

    Args:
        what: the kind, for the message.
        name: the name.
        known: all things of this kind, by name.

    Raises:
        UsageError: if nothing has that name; the message gives the nearest spelling.
    """
    if name not in known:
        raise UsageError(f"unknown {what} {name!r}; {nearest(name, known)}")
    return known[name]


def counted(number: int, what: str) -> str:
    """Returns a number and a noun, with the plural's "s" where it belongs."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def in_a_row(words: Sequence[str]) -> str:
    """Returns words with commas, and "and" before the last; "" for none."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
