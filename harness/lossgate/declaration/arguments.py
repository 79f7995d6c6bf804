# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a declaration that do not depend on the spec."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lossgate.base.errors import UsageError
from lossgate.base.layout import AXES, Axis
from lossgate.base.names import DTYPES, nearest_dtype
from lossgate.base.spelling import as_tuple, nearest, shown
from lossgate.declaration.known_failure import KnownFailure
from lossgate.declaration.precision import Precision
from lossgate.problems.whole_sequences import TOKENS, Tokens
from lossgate.specs.heads import HEADS

REFUSED = ("labels", "shapes")
"""The kinds of bad input that a candidate may refuse."""
_TILED_DIMS = ("token", "vocab", "hidden")
_LONGEST_NAME = 100
_NOT_IN_NAMES = ":/\\[]*?\"'`$"
"""Names are parts of paths, of ids in pytest, of patterns in policies and of command lines."""


def check_type(argument: str, given: Any, wanted: type, expected: str) -> Any:
    """Returns what was given, if it is of the type that is wanted.

    Raises:
        UsageError: naming the argument, its value and what was expected.
    """
    if not isinstance(given, wanted):
        raise UsageError(f"candidate({argument}={shown(given)}): expected {expected}")
    return given


def check_names(
    argument: str,
    given: Any,
    known: Iterable[str],
    what: str,
    near: Callable[[object, Iterable[str]], str] = nearest,
) -> tuple[Any, ...]:
    """Returns a tuple of names, each of them known and none twice.

    Args:
        argument: that of ``candidate``.
        given: its value.
        known: the names that it may have.
        what: these are, for the message.
        near: returns how the message ends.

    Raises:
        UsageError: naming the argument and the nearest right spelling.
    """
    choices = tuple(known)
    names = as_tuple("candidate", argument, given, ", ".join(choices), split=True)
    for name in names:
        if not isinstance(name, str) or name not in choices:
            raise UsageError(
                f"candidate({argument}={shown(given)}): unknown {what} {shown(name)}; {near(name, choices)}"
            )
        if names.count(name) > 1:
            raise UsageError(f"candidate({argument}={shown(given)}): {name!r} is named twice; name each {what} once")
    return names


def check_mapping(argument: str, given: Any, example: str) -> Mapping[Any, Any]:
    """Returns a mapping; an empty one for None.

    Raises:
        UsageError: giving the example of a right one.
    """
    return check_type(argument, {} if given is None else given, Mapping, f"a mapping, such as {example}")


def check_axes(axes: Any) -> tuple[Axis, ...]:
    return check_names("axes", axes, AXES, "mesh axis")


def check_dtypes(dtypes: Any) -> tuple[str, ...]:
    names = check_names("dtypes", dtypes, DTYPES, "dtype", nearest_dtype)
    if not names:
        raise UsageError(f"candidate(dtypes={dtypes!r}): expected at least one of {', '.join(DTYPES)}")
    return names


def check_tokens(tokens: Any) -> Tokens:
    known: Tokens | None = next((one for one in TOKENS if isinstance(tokens, str) and one == tokens), None)
    if known is None:
        raise UsageError(f"candidate(tokens={shown(tokens)}): {nearest(tokens, TOKENS)}")
    return known


def check_name(name: Any) -> str | None:
    """Returns the name, or None for the function's."""
    if name is None:
        return None
    given: str = check_type("name", name, str, "a string, such as name='my_kernel'")
    if problem := _problem_of_name(given):
        raise UsageError(
            f"candidate(name={shown(given)}): {problem}; expected up to {_LONGEST_NAME} characters that are none of "
            f"{' '.join(_NOT_IN_NAMES)}, as in file.py:NAME; write name={_mended(given)!r}"
        )
    return given


def _problem_of_name(name: str) -> str:
    """Returns what is wrong with a name, in words; it is empty if nothing is."""
    if not name.strip():
        return "it names nothing"
    if len(name) > _LONGEST_NAME:
        return f"it has {len(name)} characters"
    if name != name.strip():
        return "it begins or ends with a blank"
    odd = next((letter for letter in name if letter in _NOT_IN_NAMES or not letter.isprintable()), "")
    return f"it has {odd!r}" if odd else ""


def _mended(name: str) -> str:
    """Returns the nearest name that is allowed."""
    letters = (letter if letter.isprintable() and letter not in _NOT_IN_NAMES else "_" for letter in name.strip())
    return "".join(letters)[:_LONGEST_NAME].strip() or "my_kernel"


def check_text(argument: str, text: Any) -> str:
    if not check_type(argument, text, str, "a string").isprintable():
        raise UsageError(f"candidate({argument}={shown(text)}): expected a single line, for the verdict table")
    return text


def check_known_failure(known_failure: Any) -> KnownFailure | None:
    if known_failure is None:
        return None
    expected = "lossgate.KnownFailure(name=..., example=Path(...))"
    return check_type("known_failure", known_failure, KnownFailure, expected)


def check_exempt(exempt: Any) -> dict[str, str]:
    """Returns why the candidate is not held to some properties, by their names.

    Whether there are such properties is checked where a run is planned: files of candidates may
    register more.
    """
    example = "exempt={'strided-inputs': 'the trainer gives contiguous tensors'}"
    checked = check_mapping("exempt", exempt, example)
    for name, reason in checked.items():
        if name == "agreement":
            raise UsageError(
                f"candidate(exempt={shown(exempt)}): nothing is exempt from agreement; declare known_failure= for a "
                "disagreement that is known"
            )
        if not isinstance(name, str):
            raise UsageError(
                f"candidate(exempt={shown(exempt)}): {shown(name)} is no name of a property; write {example}"
            )
        if not isinstance(reason, str) or not reason.strip() or not reason.isprintable():
            raise UsageError(f"candidate(exempt={shown(exempt)}): expected the reason in one line, such as {example}")
    return dict(checked)


def check_refuses(head: str, refuses: Any) -> tuple[str, ...]:
    kinds = check_names("refuses", refuses, REFUSED, "kind of bad input")
    if kinds and not HEADS[head].has_logits:
        raise UsageError(
            f"candidate(refuses={kinds!r}): a kernel that starts from {head} looks up no labels; leave refuses out"
        )
    return kinds


def check_precision(precision: Any, dtypes: tuple[str, ...]) -> dict[str, Precision]:
    """Returns the precision for each dtype."""
    expected = "lossgate.Precision(...), or a mapping with one for each dtype"
    if not isinstance(precision, Mapping):
        whole: Precision = check_type("precision", Precision() if precision is None else precision, Precision, expected)
        return dict.fromkeys(dtypes, whole)
    for dtype, one in precision.items():
        if not isinstance(dtype, str) or dtype not in dtypes:
            raise UsageError(
                f"candidate(precision=...): a Precision for {shown(dtype)}, which is not one of dtypes={dtypes!r}; "
                f"{nearest(dtype, dtypes)}"
            )
        check_type(f"precision[{dtype!r}]", one, Precision, "lossgate.Precision(...)")
    if missing := [dtype for dtype in dtypes if dtype not in precision]:
        raise UsageError(
            f"candidate(precision=...): no Precision for dtype {missing[0]!r}; "
            f"give one for each of {', '.join(dtypes)}, or one for all"
        )
    return dict(precision)


def check_tiles(tiles: Any) -> dict[str, tuple[int, ...]]:
    """Returns the tile sizes by dim."""
    checked: dict[str, tuple[int, ...]] = {}
    for dim, size in check_mapping("tiles", tiles, "tiles={'vocab': 128}").items():
        if not isinstance(dim, str) or dim not in _TILED_DIMS:
            raise UsageError(f"candidate(tiles={shown(tiles)}): unknown dim {shown(dim)}; {nearest(dim, _TILED_DIMS)}")
        sizes: tuple[Any, ...] = tuple(size) if isinstance(size, tuple | list) else (size,)
        if not sizes or not all(type(s) is int and s > 0 for s in sizes):
            raise UsageError(
                f"candidate(tiles={shown(tiles)}): {dim} is {shown(size)}; expected a positive number of rows, "
                "or a tuple of them"
            )
        checked[dim] = sizes
    return checked
