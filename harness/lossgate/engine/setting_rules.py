# SPDX-License-Identifier: Apache-2.0
"""Which values each setting may have, whether a flag, a table or a program gives it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import MAX_RANKS, Layout
from lossgate.base.names import DEVICES, DTYPES, WORLD_NAMES, nearest_dtype
from lossgate.base.shape import Shape
from lossgate.base.spelling import nearest, shown

_MOST = 1_000_000
"""The largest count, and the longest time in seconds: more would never end."""
_MOST_SEED = 2**63 - 1
"""The largest number that evidence can hold."""

Check = Callable[[str, Any], str]
"""Takes the name of a setting and a value. Returns what is wrong with it; "" if nothing is."""


def refusal(name: str, value: Any) -> str:
    """Returns why a setting may not have a value, in words; "" if it may.

    Raises:
        UsageError: if there is no such setting.
    """
    if name not in RULES:
        raise UsageError(f"unknown setting {shown(name)}; {nearest(name, RULES)}")
    return RULES[name](name, value)


def _expected(name: str, value: Any, expected: str) -> str:
    return f"{name}={shown(value)}: expected {expected}"


def _whole(low: int, high: int, expected: str) -> Check:
    def check(name: str, value: Any) -> str:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return "" if is_whole and low <= value <= high else _expected(name, value, expected)

    return check


def _seconds(name: str, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number and 0 < value <= _MOST  # nan is neither
    return "" if fits else _expected(name, value, f"a positive number of seconds, at most {_MOST:,}")


def _one_of(names: tuple[str, ...]) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            return _expected(name, value, f"one of {', '.join(names)}")
        return "" if value in names else f"unknown {name} {shown(value)}; {nearest(value, names)}"

    return check


@dataclass(frozen=True)
class _EachOf:
    """Allows a list, or a tuple, of strings that may be."""

    what: str
    example: str
    why_not: Callable[[str], str] = lambda text: ""

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            return _expected(name, value, f"a list of {self.what}, such as [{self.example}]")
        return next((why for one in value if (why := self.why_not(one))), "")


def _unreadable(read: Callable[[str], object]) -> Callable[[str], str]:
    """Returns a check of a text that something reads: what is wrong with it, in words."""

    def why_not(text: str) -> str:
        try:
            read(text)
        except UsageError as error:
            return str(error)
        return ""

    return why_not


def _unknown_dtype(name: str) -> str:
    return "" if name in DTYPES else f"unknown dtype {shown(name)}; {nearest_dtype(name)}"


_COUNT = _whole(1, _MOST, f"a positive whole number, at most {_MOST:,}")
_RANKS = _whole(1, MAX_RANKS, f"a positive whole number of ranks, at most {MAX_RANKS}")

RULES: Mapping[str, Check] = {
    "examples": _COUNT,
    "rounds": _COUNT,
    "ranks": _RANKS,
    "matrix": _one_of(("covering", "full")),
    "layouts": _EachOf("layouts", "'single', 'tp=2,cp=2'", _unreadable(Layout.parse)),
    "dtypes": _EachOf("dtypes", "'float32', 'bfloat16'", _unknown_dtype),
    "sizes": _EachOf("sizes", "'4096x1024x32768'", _unreadable(Shape.of_size)),
    "world": _one_of(WORLD_NAMES),
    "device": _one_of(DEVICES),
    "seed": _whole(0, _MOST_SEED, f"a whole number from 0 to {_MOST_SEED}"),
    "timeout": _seconds,
    "jobs": _whole(0, _MOST, "a number of processes, or 0 for one on each core"),
    "shrink_calls": _whole(0, _MOST, "a number of problems, or 0 for none"),
    "properties": _EachOf("names of properties", "'agreement', 'frozen-inputs'"),
    "property_problems": _COUNT,
    "property_ranks": _RANKS,
}
"""What is checked of each setting, by name. The names of properties are looked up later: the files
of candidates may register more."""
