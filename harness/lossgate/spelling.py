# SPDX-License-Identifier: Apache-2.0
"""Help for misspelt names."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from lossgate.errors import UsageError

T = TypeVar("T")


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns how a message ends: the nearest spelling, if any, and what was expected."""
    choices = list(known)
    close = get_close_matches(str(name), choices, n=1)
    expected = f"expected one of {', '.join(choices)}" if choices else "there are none"
    return f"did you mean {close[0]!r}? ({expected})" if close else expected


_MOST_SHOWN = 60
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """Returns a value for a message: a long one cut in the middle."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print whole numbers of thousands of digits
        return "a number of thousands of digits"
    half = _MOST_SHOWN // 2
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]}...{text[-half:]}"


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
