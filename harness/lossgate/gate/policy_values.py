# SPDX-License-Identifier: Apache-2.0
"""Reads the values of a policy: a function for each kind, which says what it expected instead."""

import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.gate.patterns import literal

Read = Callable[[Any], Any]
"""Returns what a value means, or raises ``Unexpected``."""

MOST_PROBLEMS = 1_000_000
"""The greatest ``min_problems``: no cell ever has so many. More is a slip."""

_LONGEST_LAYOUT = 40
"""Characters of a layout that is repeated in an error."""
_AGE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(minute|hour|day|week)s?")
_PERCENTAGE = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,9})?) ?%")
_URL = re.compile(r"https?://[^\s/?#]+[^\s]*")


class Unexpected(Exception):
    """A value is not what was expected.

    Args:
        expected: what was expected, and the way out.
        element: which element of a list is meant; None for the whole value.
    """

    def __init__(self, expected: str, element: int | None = None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.element = element


def schema(value: Any) -> int:
    if type(value) is not int or value != 1:
        raise Unexpected("1, the schema that this version of lossgate reads")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unexpected("true or false, without quotes")
    return value


def age(value: Any) -> timedelta:
    found = _AGE.fullmatch(value) if isinstance(value, str) else None
    if found is None or not float(found[1]):
        raise Unexpected('a number over 0 and a unit, such as "3 days", "36 hours", "90 minutes" or "2 weeks"')
    return timedelta(**{f"{found[2]}s": float(found[1])})


def count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_PROBLEMS:
        raise Unexpected(f"a whole number from 1 to {MOST_PROBLEMS}, without quotes")
    return value


def effect(value: Any) -> float:
    """Reads a minimum detectable effect. A whole number is refused: 1 could be meant as 1%."""
    found = _PERCENTAGE.fullmatch(value) if isinstance(value, str) else None
    share = float(f"{found[1]}e-2") if found else value
    if not isinstance(share, float) or not 0 < share < 1:
        raise Unexpected('a number such as 0.01, or a percentage such as "1%"; more than 0 and less than 100%')
    return share


def names(value: Any) -> tuple[str, ...]:
    """Reads a list of names, which may be empty."""
    return _strings(value, 'a list of names such as ["lossgate", "torch"]')


def property_names(value: Any) -> tuple[str, ...]:
    """Reads a list of names of properties, which may be empty."""
    return _strings(value, 'a list of names of properties such as ["frozen-inputs", "no-grad"]')


def patterns(example: str) -> Read:
    """Returns what reads a list of at least one shell pattern.

    Args:
        example: a list as it could stand in a policy, for the message.
    """

    def read(value: Any) -> tuple[str, ...]:
        found = _strings(value, f"a list of shell patterns such as {example}")
        if not found:
            raise Unexpected(f"at least one shell pattern, such as {example}")
        return found

    return read


def layout_patterns(value: Any) -> tuple[str, ...]:
    """Reads shell patterns of layouts. What has no wildcard must be a layout."""
    found = patterns('["single", "tp=*"]')(value)
    for i, pattern in enumerate(found):
        name = literal(pattern)
        if name is not None:
            _check_layout(name, i)
    return found


def name(what: str) -> Read:
    """Returns what reads the name of one thing.

    Args:
        what: the thing, for the message.
    """

    def read(value: Any) -> str:
        found = text(f"the exact name of {what}")(value)
        if "*" in found or "?" in found:
            raise Unexpected(f"the exact name of {what}, without wildcards: a known failure is of one cell")
        return found

    return read


def layout(value: Any) -> str:
    found = name("a layout")(value)
    _check_layout(found)
    return found


def text(what: str) -> Read:
    """Returns what reads a text that is not empty."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise Unexpected(f"{what}, in quotes")
        return value

    return read


def url(value: Any) -> str:
    if not isinstance(value, str) or not _URL.fullmatch(value):
        raise Unexpected('the address of an issue, such as "https://example.com/issues/12"')
    return value


def day(value: Any) -> date:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise Unexpected("a date such as 2027-01-31, without quotes and without a time")
    return value


def _strings(value: Any, expected: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise Unexpected(expected)
    for i, element in enumerate(value):
        if not isinstance(element, str) or not element:
            raise Unexpected(f"{expected}; each is in quotes, and none is empty", i)
        if element in value[:i]:
            raise Unexpected("each one once; leave this one out", i)
    return tuple(value)


def _check_layout(spelling: str, element: int | None = None) -> None:
    try:
        canonical = str(Layout.parse(spelling))
    except (UsageError, ValueError) as error:
        why = f" ({error})" if isinstance(error, UsageError) and len(spelling) < _LONGEST_LAYOUT else ""
        raise Unexpected(f'a layout such as "single" or "cp=2,tp=2"{why}', element) from None
    if canonical != spelling:
        raise Unexpected(f'"{canonical}", which is how evidence spells this layout', element)
