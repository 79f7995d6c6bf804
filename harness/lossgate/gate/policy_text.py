# SPDX-License-Identifier: Apache-2.0
"""The text of a policy: what TOML makes of it, and errors that name its lines."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from itertools import islice
from pathlib import Path
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest
from lossgate.gate.policy_values import Read, Unexpected
from lossgate.gate.toml_lines import Keys, lines_of

_LONGEST = 60
"""Characters of a value that an error shows."""
_DEEPEST = 3
"""How many arrays and tables within each other an error shows."""
_SYNTAX_ERROR = re.compile(r"(.*) \(at (?:line ([0-9]+), column ([0-9]+)|end of document)\)", re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class PolicyText:
    """A policy as TOML reads it.

    Raises:
        UsageError: if it is not UTF-8, or no TOML.
    """

    def __init__(self, file: Path, content: bytes) -> None:
        self.file = file
        text = ""
        try:
            text = content.decode("utf-8-sig")
            self.values: dict[str, Any] = tomllib.loads(text)
            self.lines = lines_of(text)
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise self.fault(line, f"byte {error.start} is no UTF-8; save the file as UTF-8") from None
        except RecursionError:
            raise UsageError(f"{file}: its arrays or tables are nested too deep; a policy needs three levels") from None
        except ValueError as error:
            raise self.fault(*_syntax(str(error), text)) from None

    def line(self, path: Keys) -> int:
        """Returns the line of a key, or of the table around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, path: Keys, message: str) -> UsageError:
        """Returns an error with the place of a key in front."""
        return self.fault(self.line(path), message)

    def fault(self, line: int, message: str) -> UsageError:
        return UsageError(f"{self.file}:{line}: {message}")

    def elements(self, name: str) -> Iterator[tuple[Keys, Any]]:
        """Yields each table of an array of tables, with the way to it.

        Raises:
            UsageError: if it is no array of tables.
        """
        found = self.values.get(name, [])
        if not isinstance(found, list):
            raise self.error((name,), f"{name} = {shown(found)}: expected tables that each begin with [[{name}]]")
        yield from (((name, i), element) for i, element in enumerate(found))

    def read_table(self, path: Keys, value: Any, readers: Mapping[str, Read], needed: Iterable[str]) -> dict[str, Any]:
        """Reads the values of a table.

        Args:
            path: the way to the table.
            value: what stands there.
            readers: what reads the value of each key.
            needed: the keys that must be there.

        Raises:
            UsageError: for the first fault.
        """
        if not isinstance(value, dict):
            header = f"[[{title(path)}]]" if isinstance(path[-1], int) else f"[{title(path)}]"
            raise self.error(path, f"{title(path)} = {shown(value)}: expected a table that begins with {header}")
        read = {key: self._read((*path, key), item, readers) for key, item in value.items()}
        for key in needed:
            if key not in value:
                raise self._missing((*path, key), readers[key])
        return read

    def _read(self, path: Keys, value: Any, readers: Mapping[str, Read]) -> Any:
        read = readers.get(str(path[-1]))
        if read is None:
            raise self.error(path, f"{title(path)}: unknown key; {nearest(path[-1], readers)}")
        try:
            return read(value)
        except Unexpected as error:
            where, what = path, f"{title(path)} = {shown(value)}"
            if error.element is not None:
                where, what = (*path, error.element), f"{shown(value[error.element])} in {title(path)}"
            raise self.error(where, f"{what}: expected {error.expected}") from None

    def _missing(self, path: Keys, read: Read) -> UsageError:
        place = "below this line" if path[:-1] else "at the top"
        try:
            raise Unexpected(str(read(None)))
        except Unexpected as error:
            return self.error(
                path, f"{title(path)} is missing; write {path[-1]} = ... {place}: expected {error.expected}"
            )


def title(path: Keys) -> str:
    """Returns a key as it could stand in a policy: ``require.max_mde``."""
    keys = [key[:_LONGEST] for key in path if isinstance(key, str)]
    return ".".join(key if _BARE_KEY.fullmatch(key) else quoted(key) for key in keys)


def shown(value: Any) -> str:
    """Returns a value on one line, as it could stand in a policy; a long one is cut."""
    whole = _shown(value, _DEEPEST)
    return whole if len(whole) <= _LONGEST else f"{whole[: _LONGEST - 3]}..."


def quoted(text: str) -> str:
    """Returns a text as a TOML string on one line."""
    return "".join(map(_printable, json.dumps(text, ensure_ascii=False)))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 2**16 else f"\\U{ord(character):08x}"


def _shown(value: Any, depth: int) -> str:
    match value:
        case bool():
            return str(value).lower()
        case int():
            return str(value) if abs(value) < 2**64 else hex(value)
        case str():
            return quoted(value[:_LONGEST])
        case date() | time():
            return value.isoformat()
        case list():
            return f"[{', '.join(_shown(item, depth - 1) for item in value[:_LONGEST]) if depth else '...'}]"
        case dict():
            pairs = (f"{title((key,))} = {_shown(item, depth - 1)}" for key, item in islice(value.items(), _LONGEST))
            return f"{{{', '.join(pairs) if depth else '...'}}}"
        case _:
            return str(value)


def _syntax(message: str, text: str) -> tuple[int, str]:
    """Returns the line of a syntax error, and what is wrong there."""
    found = _SYNTAX_ERROR.fullmatch(message)
    if found is None:
        return 1, f"this is no TOML: {message}"
    if found[2] is None:
        return text.count("\n") + (not text.endswith("\n")), f"this is no TOML: {found[1]} at the end of the file"
    return int(found[2]), f"this is no TOML: {found[1]} in column {found[3]}"
