# SPDX-License-Identifier: Apache-2.0
"""The words of messages: help for misspelt names, values as they are shown, and counts."""

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
    """Returns a value as a message shows it: in one line, and a long one cut in the middle.

    Classes and functions have their name alone.
    """
    if isinstance(value, type | FunctionType):
        return value.__name__
    try:
        text = " ".join(line.strip() for line in repr(value).splitlines())
    except ValueError:  # Python does not print whole numbers of thousands of digits
        return "a number of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__}"
    except Exception:  # a class may not be able to say what it is
        return f"a {type(value).__name__}"
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"


def nearest(name: object, known: Iterable[str], known_as: str = "") -> str:
    """Returns how a message ends: the nearest spelling, if any, and what was expected.

    Args:
        name: what was given.
        known: what may be given.
        known_as: what the name is, if it is no slip but the name of something else. It is then said
            in place of a spelling.
    """
    choices = list(known)
    given = name if isinstance(name, str) else shown(name)
    close = [one for one in get_close_matches(given, choices, n=1) if not _is_of_other_number(given, one)]
    expected = f"expected one of {', '.join(choices)}" if choices else "there are none"
    hint = known_as or (f"did you mean {close[0]!r}?" if close else "")
    return f"{hint} ({expected})" if hint else expected


def _is_of_other_number(given: str, known: str) -> bool:
    """Returns whether two names differ in a number alone, as float64 and float16 do. Whoever writes
    one does not mean the other. Digits in another order are a slip.
    """
    own, others = sorted(re.findall(r"\d", given)), sorted(re.findall(r"\d", known))
    return bool(own) and own != others and re.sub(r"\d", "", given) == re.sub(r"\d", "", known)


def look_up(what: str, name: str, known: Mapping[str, T]) -> T:
    """Returns what is registered under a name.

    Args:
        what: the kind of thing, for the message.
        name: its name.
        known: everything of that kind, by name.

    Raises:
        UsageError: if there is none of that name; the message gives the nearest spelling.
    """
    if name not in known:
        raise UsageError(f"unknown {what} {name!r}; {nearest(name, known)}")
    return known[name]


def counted(number: int, what: str) -> str:
    """Returns a number and a noun, with the plural's "s" where it belongs."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def in_a_row(words: Sequence[str]) -> str:
    """Returns words with commas, and "and" before the last; "" for none."""
    *first, last = words or ("",)
    return f"{', '.join(first)} and {last}" if first else last
