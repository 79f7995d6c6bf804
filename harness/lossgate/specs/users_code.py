# SPDX-License-Identifier: Apache-2.0
"""Errors in what the author of a spec wrote: they are told as such, with their place."""

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from lossgate.errors import LossgateError, UsageError

_TORCH, _HARNESS = Path(torch.__file__).parent, Path(__file__).parents[1]
_SPECS = _HARNESS / "losses"
"""The specs that are built in are written as users write theirs."""

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
    "must have the same scalar type": (
        "references run in float64: make tensors with values.logprobs.new_zeros(...), and turn counts with .to(...)"
    ),
}
"""What to do, by a part of torch's message."""


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
        text = str(error).rstrip()
        remedies = [f"; {remedy}" for part, remedy in _REMEDIES.items() if part in text]
        text = text.split(". ")[0] if remedies else text  # the rest asks to report an issue to torch
        raise UsageError(f"{what} raised {type(error).__name__}: {text}{_place(error)}{''.join(remedies)}") from error


def _place(error: Exception) -> str:
    """Returns the innermost line that is neither torch's nor the harness's; empty if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if _is_theirs(Path(frame.filename))]
    return f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""


def _is_theirs(file: Path) -> bool:
    if file.is_relative_to(_HARNESS):
        return file.is_relative_to(_SPECS)
    return not file.is_relative_to(_TORCH)
