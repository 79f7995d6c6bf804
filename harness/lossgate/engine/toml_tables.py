# SPDX-License-Identifier: Apache-2.0
"""Checks settings and tables of TOML against the fields of a class.

The type of a field says which values are allowed, and msgspec checks them. ``Expected`` says the
same in words: ``Annotated[int, Meta(ge=1), Expected("a positive number")]``.
"""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from typing_extensions import TypeIs

from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest, shown

T = TypeVar("T")
Table = TypeVar("Table", bound=msgspec.Struct)


class Expected(NamedTuple):
    """The values that a field may have, in words, as an annotation of the field's type."""

    what: str
    """The words for messages. The examples of ``msgspec.Meta`` follow them."""
    check: Callable[[Any], object] = lambda value: None
    """Raises a UsageError for a wrong value of the right type."""


def one_of(names: Iterable[str]) -> Expected:
    """Expects one of several names. The message suggests the nearest name."""
    known = tuple(names)

    def check(name: str) -> None:
        if name not in known:
            raise UsageError(nearest(name, known))

    return Expected(f"one of {', '.join(known)}", check)


def each(what: str, read: Callable[[str], object]) -> Expected:
    """Expects a list of names that can be read.

    Args:
        what: a description of the list, for the message.
        read: reads one name. Raises a UsageError if that is wrong.
    """
    return Expected(what, lambda names: [read(name) for name in names])


def parse_toml(content: bytes, file: Path) -> dict[str, Any]:
    """Parses the content of a TOML file.

    Raises:
        UsageError: if the content is no TOML. The message names the file.
    """
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start} is no UTF-8; save the file in UTF-8") from None
    except RecursionError:
        raise UsageError(f"{file}: its values are nested too deeply") from None
    except ValueError as error:  # a TOMLDecodeError, or a number with too many digits
        raise UsageError(f"{file}: {error}") from None


def read_table(model: type[Table], table: Any, where: str) -> Table:
    """Reads a table as an object of a class whose fields are its keys.

    Args:
        model: the class.
        table: the value in the file.
        where: the file and the header of the table. Each message begins with it.

    Raises:
        UsageError: if the value is no table, or if a key is unknown, missing or has a wrong value.
    """
    if not isinstance(table, dict):
        raise UsageError(f"{where}{shown(table)}: expected a table")
    values = read_fields(model, table, where)
    for field in msgspec.structs.fields(model):
        if field.required and field.name not in values:
            raise UsageError(f"{where}{field.name} is missing; expected {_expected(_types(model)[field.name])}")
    try:
        return model(**values)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None


def read_fields(model: type[Any], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Reads the keys of a table that may lack fields of the class. See ``read_table``."""
    try:
        return {name: read_field(model, name, value) for name, value in table.items()}
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None


def read_field(model: type[Any], name: str, value: Any) -> Any:
    """Converts a value to the type of a field: a list becomes a tuple, and 5 seconds become 5.0.

    Raises:
        UsageError: if there is no such field, or if the value is wrong. The message names the
            field, the value, and what was expected.
    """
    types = _types(model)
    if name not in types:
        raise UsageError(f"unknown key {shown(name)}; {nearest(name, types)}")
    field = types[name]
    value = _with_read_tables(field, name, value)
    try:
        read = msgspec.convert(value, field)
        _said(field).check(read)
    except msgspec.ValidationError:
        raise UsageError(f"{name}={shown(value)}: expected {_expected(field)}") from None
    except UsageError as error:
        raise UsageError(f"{name}={shown(value)}: {error}") from None
    return read


def _with_read_tables(field: Any, name: str, value: Any) -> Any:
    """Reads the tables within a value, so that messages about their keys name these tables."""
    kind, *_ = get_args(field)
    if isinstance(value, dict) and _is_table(kind):
        return read_table(kind, value, f"[{name}] ")
    item = next((of for of in get_args(kind) if _is_table(of)), None)
    if isinstance(value, list) and item is not None:
        return [read_table(item, one, f"[[{name}]] number {number}: ") for number, one in enumerate(value, 1)]
    return value


def _is_table(kind: Any) -> TypeIs[type[msgspec.Struct]]:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _expected(field: Any) -> str:
    """Returns the values that a field may have, in words, with the examples of its type."""
    examples = [shown(one) for meta in _annotations(field, msgspec.Meta) for one in meta.examples or ()]
    what = _said(field).what
    return f"{what}, such as {' or '.join(examples)}" if examples else what


def _said(field: Any) -> Expected:
    (said,) = _annotations(field, Expected)
    return said


@cache
def _types(model: type[Any]) -> Mapping[str, Any]:
    """Returns the types of the fields that people may set. These have an ``Expected``."""
    hints = get_type_hints(model, include_extras=True)
    return {name: hint for name, hint in hints.items() if _annotations(hint, Expected)}


def _annotations(field: Any, kind: type[T]) -> list[T]:
    """Returns the annotations of a field's type that are instances of a class."""
    return [one for one in getattr(field, "__metadata__", ()) if isinstance(one, kind)]
