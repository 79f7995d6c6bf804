# SPDX-License-Identifier: Apache-2.0
"""The base of classes that hold inputs or options: each subclass is a frozen dataclass."""

from dataclasses import MISSING, dataclass
from dataclasses import field as dataclass_field
from dataclasses import fields as dataclass_fields
from math import isfinite
from types import MappingProxyType
from typing import Any

from typing_extensions import dataclass_transform

from lossgate.errors import UsageError
from lossgate.problems.partition import Dims

DTYPES = MappingProxyType(
    {
        "float32": "float32",
        "bool": "bool",
        "int32": "int32",
        "int64": "int64",
        "int": "a Python int",
        "input": "the dtype of the problem",
    }
)
"""The dtypes that a field may have, for people."""


def field(
    dims: str,
    meaning: str,
    *,
    dtype: str = "float32",
    draw: Any = None,
    count: Any = None,
    unshifted: bool = False,
) -> Any:
    """Declares an input of a spec, as the value of a field of its batch class.

        class WeightedBatch(lossgate.Batch):
            weights: Tensor = lossgate.field("token", "its weight", draw=lambda c: c.uniform())

    Args:
        dims: the names of its dims, separated by spaces: "token", "sequence", "vocab" are split
            over ranks, every other name is not. "" is a scalar.
        meaning: what it holds, for people.
        dtype: "float32", "bool" or "int64". A bool for each token is a mask: false at padding.
        draw: ``context -> tensor``, how problems draw it; see ``lossgate.FieldContext``. By default
            floats are standard normal, and about two in three bools are true.
        count: ``batch -> tensor``, for what counts or sums other fields over the whole batch. It is
            computed anew whenever a token is masked.
        unshifted: it belongs to a token itself, not to the prediction of the next one. A candidate
            that is given whole sequences finds it at its token, and all others one entry later.

    Raises:
        UsageError: if an argument is none of these.
    """
    if not isinstance(dims, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"field({dims!r}, ...): expected names of dims in one string, such as 'token' or 'token topk'")
    if not isinstance(meaning, str) or not meaning.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"field({dims!r}, {meaning!r}): expected what it means, in words")
    if dtype not in DTYPES:
        raise UsageError(f"field({dims!r}, dtype={dtype!r}): expected 'float32', 'bool' or 'int64'")
    for name, function in {"draw": draw, "count": count}.items():
        if function is not None and not callable(function):
            raise UsageError(f"field({dims!r}, {name}={function!r}): expected a function")
    if draw is not None and count is not None:
        raise UsageError(f"field({dims!r}, {meaning!r}): give draw= or count=, not both")
    own = Field(tuple(dims.split()), " ".join(meaning.split()), dtype, draw, count, unshifted)  # pyright: ignore[reportArgumentType]
    return dataclass_field(metadata={"field": own})


@dataclass(frozen=True)
class Field:
    """What ``field`` declares."""

    dims: Dims
    meaning: str
    dtype: str
    draw: Any = None
    count: Any = None
    unshifted: bool = False

    @property
    def shape(self) -> str:
        """Its dims, for people."""
        return f"[{', '.join(self.dims)}]" if self.dims else "scalar"


def option(
    default: Any, meaning: str, *, choices: tuple[Any, ...] = (), between: tuple[float, float] | None = None
) -> Any:
    """Declares an option of a spec, as the value of a field of its option class.

        class FocalOptions(lossgate.Options):
            gamma: float = lossgate.option(2.0, "the power of 1 - p", choices=(2.0, 0.0, 0.5))

    Args:
        default: its default.
        meaning: what it does, for people.
        choices: the values that problems draw, the default among them. A kernel may support other
            numbers too, if one of these is a float. By default False and True, for a bool.
        between: problems draw numbers between these two, in place of ``choices``.

    Raises:
        UsageError: if an argument is none of these.
    """
    if not isinstance(meaning, str) or not meaning.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"option({default!r}, {meaning!r}): expected what it means, in words")
    _check_domain(default, choices, between)
    domain = Between(between) if between is not None else tuple(choices)
    if not domain and isinstance(default, bool):
        domain = (default, not default)
    meaning = " ".join(meaning.split())
    return dataclass_field(default=default, metadata={"meaning": meaning, **({"domain": domain} if domain else {})})


def is_plain(value: Any) -> bool:
    """Returns whether a value is one that an option may have: problems are written as JSON."""
    finite = not isinstance(value, float) or isfinite(value)
    return value is None or (isinstance(value, str | bool | int | float) and finite)


def _check_domain(default: Any, choices: Any, between: Any) -> None:
    where = (
        f"option({default!r}, choices={choices!r}" if between is None else f"option({default!r}, between={between!r}"
    )
    if choices and between is not None:
        raise UsageError(f"{where}, choices={choices!r}): give choices= or between=, not both")
    if not isinstance(choices, tuple):
        raise UsageError(f"{where}): expected a tuple of values, such as choices=({default!r},)")
    for value in (default, *choices):
        if not is_plain(value):
            raise UsageError(f"{where}): {value!r} can't be written into a problem; expected numbers, strings or None")
    if choices and not any(type(c) is type(default) and c == default for c in choices):
        same = [c for c in choices if c == default]
        raise UsageError(
            f"{where}): the default is {default!r} and the choice is {same[0]!r}; write both alike"
            if same
            else f"{where}): the default is none of them; add it"
        )
    if between is not None:
        _check_between(default, between, where)


def _check_between(default: Any, between: Any, where: str) -> None:
    numbers = isinstance(between, tuple) and len(between) == 2 and all(map(_is_number, between))
    if not numbers or not between[0] < between[1]:
        raise UsageError(f"{where}): expected two numbers, the smaller first, such as between=(0.3, 3.0)")
    if not _is_number(default) or not between[0] <= default <= between[1]:
        raise UsageError(f"{where}): the default is not between them")


def _is_number(value: Any) -> bool:
    return is_plain(value) and isinstance(value, int | float) and not isinstance(value, bool)


class Between(tuple[float, float]):
    """All numbers from the first to the second."""

    __slots__ = ()


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, option))
class Record:
    """A class whose subclasses are frozen dataclasses with keyword arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)


class Options(Record):
    """Base of the options of a spec. Each field is declared with ``lossgate.option``."""


def fields_of(holder: type) -> dict[str, Field]:
    """Returns what ``field`` declared in a class and its bases, by name."""
    own = dataclass_fields(holder) if hasattr(holder, "__dataclass_fields__") else ()
    return {f.name: f.metadata["field"] for f in own if "field" in f.metadata}


def has_default(f: Any) -> bool:
    """Returns whether a field of a dataclass has a default."""
    return f.default is not MISSING or f.default_factory is not MISSING
