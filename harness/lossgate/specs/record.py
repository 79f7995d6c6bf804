# SPDX-License-Identifier: Apache-2.0
"""The base of classes that hold inputs or options: each subclass is a frozen dataclass."""

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from dataclasses import fields as dataclass_fields
from itertools import combinations
from math import isfinite
from types import MappingProxyType
from typing import Any, Self

from typing_extensions import dataclass_transform

from lossgate.base.argument import Argument, arguments
from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown
from lossgate.problems.partition import Dims

FIELD_DTYPES = ("float32", "bool", "int64")
"""The dtypes that a spec's own field may have."""

INPUT_DTYPES = MappingProxyType(
    {
        "float32": "float32",
        "bool": "bool",
        "int32": "int32",
        "int64": "int64",
        "int": "a Python int",
        "input": "one of the candidate's dtypes",
    }
)
"""The dtypes that inputs have, for people."""


def field(
    dims: str,
    meaning: str,
    *,
    dtype: str = "float32",
    draw: Any = None,
    count: Any = None,
    unshifted: bool = False,
    unused: bool = False,
    elsewhere: tuple[str, ...] = (),
) -> Any:
    """Declares an input of a spec, as the value of a field of its batch class.

    For example::

        class WeightedBatch(lossgate.Batch):
            weights: Tensor = lossgate.field("token", "its weight", draw=lambda c: c.uniform())

    Args:
        dims: the names of its dims, separated by spaces; "" for a scalar. Dims "token", "sequence"
            and "vocab" are split over ranks, all others are not.
        meaning: what it holds, for people.
        dtype: "float32", "bool" or "int64". A bool for each token is a mask: false at padding.
        draw: ``context -> tensor``, which draws it; see ``lossgate.FieldContext``. By default
            floats are standard normal, and about two in three bools are true.
        count: ``batch -> tensor``, for a count or sum of other fields over the whole batch. It is
            computed again whenever a token is masked.
        unshifted: whether the field belongs to the token itself, such as a teacher's logits or
            values, and not to the prediction of the next token, such as advantages and
            log-probabilities. It matters only to candidates with ``tokens="rows"`` or ``"packed"``:
            they find the values of predictions one entry later.
        unused: whether the reference does without it, because kernels may compute another field
            from it. No known mistake is then about this field.
        elsewhere: names that other losses give to the field. A kernel that asks for one of them is
            told this one.

    Raises:
        UsageError: if an argument is not as described.
    """
    given = arguments(f"field({shown(dims)}, ", locals())
    _check_dims(Argument("field(", "dims", dims))
    given["meaning"].words()
    given["dtype"].one_of(FIELD_DTYPES)
    if draw is not None and count is not None:
        raise given["count"].error("give draw= or count=, not both")
    if count is not None and dims.split():
        raise given["count"].error("a count of the whole batch is a scalar; write field('', ...)")
    for name, takes in (("draw", "context"), ("count", "batch")):
        if given[name].value is not None:
            given[name].function(takes)
    given["unshifted"].truth()
    given["unused"].truth()
    own = Field(
        dims=tuple(dims.split()),
        meaning=" ".join(meaning.split()),
        dtype=dtype,
        draw=draw,
        count=count,
        unshifted=unshifted,
        unused=unused,
        elsewhere=given["elsewhere"].several("names of fields"),
    )
    return dataclass_field(metadata={"field": own})


def built_in_field(dims: str, meaning: str, *, dtype: str, unshifted: bool = False) -> Any:
    """Declares an input of every spec or head, as ``field`` does, with any of ``INPUT_DTYPES``."""
    own = Field(tuple(dims.split()), meaning, dtype, unshifted=unshifted)
    return dataclass_field(metadata={"field": own})


def _check_dims(dims: Argument) -> None:
    names = dims.instance(str, "names of dims in one string, such as 'token' or 'token topk'").split()
    for dim in names:
        if not dim.isidentifier():
            raise dims.error(f"{dim!r} is no name of a dim; separate names by spaces alone")
    if len({*names}) < len(names):
        raise dims.error("a dim is named twice; give each dim a name of its own")
    if "token" in names[1:]:
        raise dims.error("the dim 'token' must be the first")


@dataclass(frozen=True)
class Field:
    """An input as ``field`` declares it."""

    dims: Dims
    meaning: str
    dtype: str
    draw: Any = None
    count: Any = None
    unshifted: bool = False
    unused: bool = False
    elsewhere: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """Its dims, for people."""
        return f"[{', '.join(self.dims)}]" if self.dims else "scalar"

    @property
    def described(self) -> str:
        """Its dims, dtype and meaning, for people."""
        return f"{self.shape}, {INPUT_DTYPES[self.dtype]}: {self.meaning}."


def option(
    default: Any, meaning: str, *, choices: tuple[Any, ...] = (), between: tuple[float, float] | None = None
) -> Any:
    """Declares an option of a spec, as the value of a field of its option class.

    For example::

        class FocalOptions(lossgate.Options):
            gamma: float = lossgate.option(2.0, "the power of 1 - p", choices=(2.0, 0.0, 1.0))

    Args:
        default: its default.
        meaning: what it does, for people.
        choices: the values that problems draw, including the default. If one is a float, a kernel
            may also support numbers that are not listed. By default a bool has both values.
        between: two numbers between which problems draw, instead of ``choices``.

    Raises:
        UsageError: if an argument is not as described.
    """
    given = arguments(f"option({shown(default)}, ", locals())
    meaning = given["meaning"].words()
    if choices and between is not None:
        raise given["between"].error("give choices= or between=, not both")
    domain: Any = choices
    if between is not None:
        is_pair = isinstance(between, tuple) and len(between) == 2  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_pair:
            raise given["between"].error(_TWO_NUMBERS)
        domain = Between(*between)
    elif choices == () and isinstance(default, bool):
        domain = (default, not default)
    check_domain(default, domain, given["choices" if between is None else "between"])
    metadata = {"meaning": meaning, "domain": domain} if domain else {"meaning": meaning}
    return dataclass_field(default=default, metadata=metadata)


def is_plain(value: Any) -> bool:
    """Returns whether an option may have a value, because JSON can hold it."""
    finite = not isinstance(value, float) or isfinite(value)
    return value is None or (isinstance(value, str | bool | int | float) and finite)


def check_domain(default: Any, domain: Any, given: Argument) -> None:
    """Checks the values that problems draw for an option.

    Args:
        default: of the option.
        domain: its choices, or ``Between(low, high)``.
        given: the argument that declares them, for the message.

    Raises:
        UsageError: if a value can't be written into a problem, or the default is not among them.
    """
    if isinstance(domain, Between):
        if not _is_number(default) or not domain[0] <= default <= domain[1]:
            raise given.error(f"the default {default!r} is not between them")
        return
    if not isinstance(domain, tuple):
        raise given.error(f"expected a tuple of values, such as ({default!r},)")
    for value in (default, *domain):
        if not is_plain(value):
            raise given.error(f"{value!r} can't be written into a problem; expected numbers, strings or None")
    for one, other in combinations((default, *domain), 2):
        if one == other and repr(one) != repr(other):  # 1, 1.0 and True are equal, and other JSON
            raise given.error(f"{one!r} and {other!r} are equal; write both alike")
    if domain and default not in domain:
        raise given.error(f"the default {default!r} is not among them; add it")


def _is_number(value: Any) -> bool:
    return is_plain(value) and isinstance(value, int | float) and not isinstance(value, bool)


_TWO_NUMBERS = "expected two numbers, the smaller first, such as between=(0.3, 3.0)"


class Between(tuple[float, float]):
    """All numbers from ``low`` to ``high``."""

    __slots__ = ()

    def __new__(cls, low: float, high: float) -> Self:
        if not _is_number(low) or not _is_number(high) or not low < high:
            raise UsageError(f"between ({low!r}, {high!r}): {_TWO_NUMBERS}")
        return super().__new__(cls, (low, high))

    def __getnewargs__(self) -> tuple[float, float]:
        return self[0], self[1]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, built_in_field, option))
class Record:
    """A class whose subclasses are frozen dataclasses with keyword arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        try:
            dataclass(frozen=True, kw_only=True)(cls)
        except TypeError as error:  # a field or option without an annotation
            raise UsageError(f"class {cls.__name__}: {error}; write one, such as weights: Tensor = ...") from None


class Options(Record):
    """Base of the options of a spec. Each field is declared with ``lossgate.option``."""


def fields_of(holder: type) -> dict[str, Field]:
    """Returns the inputs that a class and its bases declare with ``field``, by name."""
    own = dataclass_fields(holder) if hasattr(holder, "__dataclass_fields__") else ()
    return {f.name: f.metadata["field"] for f in own if "field" in f.metadata}
