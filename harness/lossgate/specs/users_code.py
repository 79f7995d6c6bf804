# SPDX-License-Identifier: Apache-2.0
"""Errors in what the author of a spec wrote: they are told as such, with their place."""

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from lossgate.errors import LossgateError, UsageError

_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1] / "specs"))


@contextmanager
def told_as(what: str) -> Generator[None]:
    """Raises what goes wrong as a ``UsageError`` that says whose code it is, and where.

    Args:
        what: the code that is run, such as "spec 'focal': its reference".
    """
    try:
        yield
    except LossgateError:
        raise
    except Exception as error:
        raise UsageError(f"{what} raised {type(error).__name__}: {error}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Returns the innermost line that is neither torch's nor the harness's; empty if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
