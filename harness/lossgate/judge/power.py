# SPDX-License-Identifier: Apache-2.0
"""The self-check of a comparison: errors planted in its own result, which it must reject where its limits say so."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lossgate.judge.statistics import Grouping

PLANTED = {
    "x1.01": "scaled by 1.01",
    "x0.99": "scaled by 0.99",
    "zero": "zero",
    "token dropped": "without one token's part",
    "vocab tile dropped": "without one vocabulary tile's part",
}


def plant(result: Tensor, reference: Tensor, groupings: Sequence[Grouping]) -> dict[str, Tensor]:
    """Copies of a result, each with one error. What is dropped is the part of middle size, neither the plainest nor the least."""
    planted = {"x1.01": result * 1.01, "x0.99": result * 0.99, "zero": torch.zeros_like(result)}
    for grouping in groupings:
        name = f"{grouping.name} dropped"
        if name in PLANTED:
            planted[name] = result.index_fill(grouping.dim, _middle_part(reference, grouping), 0.0)
    return planted


def _middle_part(reference: Tensor, grouping: Grouping) -> Tensor:
    """The slices of the part whose norm is the median of those that are not zero."""
    others = [d for d in range(reference.dim()) if d != grouping.dim]
    squares = reference.square().sum(others) if others else reference.square()
    norms = squares.new_zeros(grouping.parts).index_add_(0, grouping.index, squares)
    present = norms.nonzero().squeeze(1)
    middle = present[norms[present].argsort()[len(present) // 2]]
    return (grouping.index == middle).nonzero().squeeze(1)


def blind_spots(scales: dict[str, float], rejected: dict[str, bool], scale: float, limit: float) -> tuple[str, ...]:
    """Planted errors that shift SCALE by more than could hide in the limit, and were accepted all the same.

    scales: SCALE of each planted result; scale: of the result itself. A judge without a fault has none.
    """
    visible = limit + abs(scale)
    return tuple(name for name, value in scales.items() if abs(value - scale) > visible and not rejected[name])
