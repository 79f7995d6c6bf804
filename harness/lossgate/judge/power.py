# SPDX-License-Identifier: Apache-2.0
"""The self-check of a comparison: it plants errors in its own result. It must reject each error
that is visible by its own limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.judge.rows import Rows
from lossgate.judge.statistics import Blocks

PLANTED = {
    "x1.01": "scaled by 1.01",
    "x0.99": "scaled by 0.99",
    "zero": "zero",
    "token dropped": "without the part of one token",
    "vocab tile dropped": "without the part of one vocabulary tile",
}


@dataclass(frozen=True)
class Planted:
    """An error in a result."""

    factor: float
    """The factor by which the result is multiplied."""
    dim: int = 0
    dropped: Tensor | None = None
    """Bool: which slices along ``dim`` are set to zero; None for none."""

    def put(self, result: Tensor, rows: Rows) -> Tensor:
        """Returns some rows of a result with the error."""
        if self.dropped is None:
            return result * self.factor
        if self.dim == 1:
            return result.masked_fill(self.dropped, 0.0)
        return result.masked_fill(self.dropped[rows].view(-1, *[1] * (result.dim() - 1)), 0.0)


def plant(reference: Tensor, blocks: Sequence[Blocks]) -> dict[str, Planted]:
    """Returns errors to put into a result, by name.

    From each kind of blocks, the block of median size is dropped.
    """
    planted = {"x1.01": Planted(1.01), "x0.99": Planted(0.99), "zero": Planted(0.0)}
    for cut in blocks:
        name = f"{cut.name} dropped"
        if name in PLANTED:
            planted[name] = Planted(1.0, cut.dim, _median_block(reference, cut))
    return planted


def _median_block(reference: Tensor, cut: Blocks) -> Tensor:
    """Returns the slices of the block with the median norm, as a bool for each slice. Blocks that
    are zero are left out.
    """
    others = [d for d in range(reference.dim()) if d != cut.dim]
    squares = reference.square().sum(others) if others else reference.square()
    norms = squares.new_zeros(cut.count).index_add_(0, cut.index, squares)
    present = norms.nonzero().squeeze(1)
    if not len(present):  # even the squares of the largest entries underflow, so any block will do
        present = torch.arange(cut.count)
    middle = present[norms[present].argsort()[len(present) // 2]]
    return cut.index == middle


def blind_spots(scales: dict[str, float], rejected: dict[str, bool], scale: float, limit: float) -> tuple[str, ...]:
    """Returns the planted errors that were accepted although they shift SCALE visibly.

    There are none if the judge works.

    Args:
        scales: SCALE of the result with each planted error.
        rejected: whether each of these results was rejected.
        scale: SCALE of the result itself.
        limit: the limit of SCALE.
    """
    visible = limit + abs(scale)
    return tuple(name for name, value in scales.items() if abs(value - scale) > visible and not rejected[name])
