# SPDX-License-Identifier: Apache-2.0
"""Some rows of an output at a time, so that no tensor of a whole stack of results is ever held."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_AT_ONCE = 1 << 18
"""Entries of one result that are read at once."""

Rows = slice
"""Some of the first dim of an output; all of it for a scalar."""

Stack = Callable[[Rows], Tensor]
"""Some rows of a stack of results, ``[n, rows, ...]`` in float64."""


def fits_at_once(shape: torch.Size) -> bool:
    """Returns whether an output is read in one go."""
    return shape.numel() <= _AT_ONCE


def some_rows(shape: torch.Size) -> Iterator[Rows]:
    """Yields the rows of an output, as many at once as are to be read."""
    if fits_at_once(shape):
        yield slice(None)
        return
    at_once = max(1, _AT_ONCE // shape[1:].numel())
    for start in range(0, shape[0], at_once):
        yield slice(start, start + at_once)


def at(tensor: Tensor, rows: Rows) -> Tensor:
    """Returns some rows of one output; a scalar as it is."""
    return tensor[rows] if tensor.dim() else tensor


def kept_if_small(compute: Callable[[Rows], Tensor], shape: torch.Size) -> Callable[[Rows], Tensor]:
    """Returns what computes some rows of an output; if it is small, they are computed once."""
    if not fits_at_once(shape):
        return compute
    whole = compute(slice(None))
    return lambda rows: at(whole, rows)


def stack_of(tensor: Tensor) -> Stack:
    """Returns a stack whose tensor, ``[n, *shape]``, is there."""
    return lambda rows: (tensor[:, rows] if tensor.dim() > 1 else tensor).double()
