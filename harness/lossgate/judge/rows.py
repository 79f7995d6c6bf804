# SPDX-License-Identifier: Apache-2.0
"""Reads an output some rows at a time, so that no tensor holds a whole stack of large results."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_AT_ONCE = 1 << 18
"""Entries of one result that are read at once."""

Rows = slice
"""Some slices along the first dim of an output. A scalar is always read as a whole."""

Stack = Callable[[Rows], Tensor]
"""A function that returns some rows of a stack of results, ``[n, rows, ...]`` in float64."""


def fits_at_once(shape: torch.Size) -> bool:
    """Returns whether an output is small enough to be read in one go."""
    return shape.numel() <= _AT_ONCE


def some_rows(shape: torch.Size) -> Iterator[Rows]:
    """Yields consecutive rows of an output, as many at a time as may be read at once."""
    if fits_at_once(shape):
        yield slice(None)
        return
    at_once = max(1, _AT_ONCE // shape[1:].numel())
    for start in range(0, shape[0], at_once):
        yield slice(start, start + at_once)


def at(tensor: Tensor, rows: Rows) -> Tensor:
    """Returns some rows of one output. A scalar is returned as it is."""
    return tensor[rows] if tensor.dim() else tensor


def kept_if_small(compute: Callable[[Rows], Tensor], shape: torch.Size) -> Callable[[Rows], Tensor]:
    """Returns a function that gives the same rows as ``compute``. For a small output, it computes
    all rows at once and keeps them.
    """
    if not fits_at_once(shape):
        return compute
    whole = compute(slice(None))
    return lambda rows: at(whole, rows)


def stack_of(tensor: Tensor) -> Stack:
    """Returns the stack that reads the rows of a tensor, ``[n, *shape]``."""
    return lambda rows: (tensor[:, rows] if tensor.dim() > 1 else tensor).double()
