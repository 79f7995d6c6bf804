# SPDX-License-Identifier: Apache-2.0
"""Whether two computations have one effect."""

import torch
from torch import Tensor

_EQUAL = 1e-6
"""Relative difference below which two computations in float64 have one effect."""


def same(one: Tensor, other: Tensor, apart: float = _EQUAL) -> bool:
    """Returns whether two tensors are equal but for the rounding of float64, or further apart.

    Args:
        one: a tensor.
        other: of its shape.
        apart: the most that entries may differ, relative to the largest.
    """
    finite = one.isfinite() & other.isfinite()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (torch.where(finite, x, 0.0) for x in (one, other))
    size = float(torch.maximum(one.abs(), other.abs()).max()) if one.numel() else 0.0
    return not size or float((one - other).abs().max()) <= apart * size
