# SPDX-License-Identifier: Apache-2.0
"""What a module makes while it is imported, whether it keeps a name for it or not.

A candidate in a list, or one of a loop, can be loaded again as well as one at the top of a file:
whoever imports the file makes it again. And one that a second function of its name replaces would
be lost without a word.
"""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any, NamedTuple

_KEY = "__lossgate_made__"
_DEPTH = 3
"""How deep lists and mappings of a module are looked into."""


class Made(NamedTuple):
    """A candidate, and the line of the module at which it was made."""

    what: Any
    line: int


def note_made(what: Any) -> None:
    """Notes a candidate in the module whose import makes it, if there is one.

    The program that was started is none: its candidates are made anew whenever it calls a function.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "__main__":
        return
    spec = frame.f_globals.get("__spec__")  # another one if the module is imported again
    known = frame.f_globals.get(_KEY)
    if known is None or known[0] is not spec:
        known = frame.f_globals[_KEY] = (spec, [])
    known[1].append(Made(what, frame.f_lineno))


def made_in(module: ModuleType) -> list[Made]:
    """Returns what a module made while it was imported, in order."""
    return list(vars(module).get(_KEY, (None, ()))[1])


def kept_in(module: ModuleType) -> Iterator[Any]:
    """Yields the values that a module has names for, and those in its lists and mappings."""
    for name, value in [*vars(module).items()]:
        if name != _KEY:
            yield from _values(value, _DEPTH)


def _values(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth and type(value) in (list, tuple, dict, set, frozenset):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _values(each, depth - 1)
