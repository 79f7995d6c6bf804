# SPDX-License-Identifier: Apache-2.0
"""Reports exceptions of functions that the author of a spec wrote, with their place in the code."""

import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lossgate.base.errors import LossgateError, UsageError

_TORCH, _HARNESS = Path(torch.__file__).parent, Path(__file__).parents[1]
_SPECS = _HARNESS / "losses"
"""Built-in specs are written as users write theirs, so their lines are reported, too."""

_REMEDIES = {
    "data-dependent control flow": (
        "references run under torch.vmap: write torch.where or clamp in place of if, while and min() of a tensor"
    ),
    "dynamic shape": (
        "references run under torch.vmap: write torch.where(mask, x, 0.0) in place of x[mask], and "
        "x.new_zeros(batch.sequences).index_add(0, batch.sequence, x) for sums of sequences"
    ),
    "vmap: inplace arithmetic": "references run under torch.vmap: write index_add in place of index_add_, and so on",
    "vmap: It looks like you're calling .item()": (
        "references run under torch.vmap: no .item(), .tolist(), float() or int() of a tensor"
    ),
    "must match the size of tensor": (
        "write x[batch.sequence] to take what belongs to sequences to their tokens, and "
        "x.new_zeros(batch.sequences).index_add(0, batch.sequence, x) for sums of sequences"
    ),
    "must have the same scalar type": (
        "references run in float64: make tensors with values.logprobs.new_zeros(...), and turn counts with .to(...)"
    ),
}
"""The way out, by a part of torch's message."""


def told_as(what: str) -> AbstractContextManager[None]:
    """Turns an exception into a ``UsageError`` that says whose code raised it, and where.

    Args:
        what: the code that is run, such as "spec 'focal': its reference".
    """
    return _ToldAs(what)


class _ToldAs(AbstractContextManager[None]):
    """The context manager of ``told_as``. Every call of a reference enters it, and a generator
    would take three times as long.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # SystemExit is reported, too: a reference that calls sys.exit(0) would end the run as
        # AGREE.
        if not isinstance(error, Exception | SystemExit) or isinstance(error, LossgateError):
            return
        text = str(error).rstrip()
        remedies = [f"; {remedy}" for part, remedy in _REMEDIES.items() if part in text]
        if remedies:
            text = text.split(". ")[0]  # the rest asks to report an issue to torch
        message = f"{self._what} raised {type(error).__name__}: {text}{_place(error)}{''.join(remedies)}"
        raise UsageError(message) from error


def _place(error: BaseException) -> str:
    """Returns in words the innermost line of the author's code; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_theirs(Path(frame.filename))]
    return f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""


def _is_theirs(file: Path) -> bool:
    """Returns whether a file is neither torch's nor lossgate's, or defines a built-in spec."""
    if file.is_relative_to(_HARNESS):
        return file.is_relative_to(_SPECS)
    return not file.is_relative_to(_TORCH)


def described(value: Any) -> str:
    """Returns a value's kind in words: the shape of a tensor, or the type."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"the {type(value).__name__}"
