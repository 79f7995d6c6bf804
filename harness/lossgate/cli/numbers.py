# SPDX-License-Identifier: Apache-2.0
"""Options that are numbers.

By itself the library of the command line rounds: ``--seed 1.5`` would be seed 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

from cyclopts import Parameter, Token

from lossgate.errors import UsageError
from lossgate.spelling import shown


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """Returns the whole number that an option is given.

    Raises:
        UsageError: if it is given anything else.
    """
    for base in (10, 0):  # the latter also reads 0x10
        with suppress(ValueError):
            return int(tokens[0].value, base)
    raise _unlike(tokens[0], "a whole number")


def _number(_: Any, tokens: Sequence[Token]) -> float:
    """Returns the number that an option is given.

    Raises:
        UsageError: if it is given anything else.
    """
    with suppress(ValueError):
        return float(tokens[0].value)
    raise _unlike(tokens[0], "a number")


def _unlike(token: Token, expected: str) -> UsageError:
    return UsageError(f"{token.keyword} {shown(token.value)}: expected {expected}")


Whole = Annotated[int | None, Parameter(converter=_whole)]
"""A whole number, or None if the option is left out."""
Number = Annotated[float | None, Parameter(converter=_number)]
"""A number, or None if the option is left out."""
