# SPDX-License-Identifier: Apache-2.0
"""Measures deviations from the reference, in units of the noise that a correct kernel may have.

R is the reference, K a result, d = K - R, and s the noise of each entry. All statistics are
computed for a stack of results at once, along the first dim.

    SCALE  <d, R / s^2> / <R, R / s^2>          by how much the whole is too large
    NOISE  rms(d / s)                           how noisy it is
    WORST  max |d / s|                          its worst entry
    BLOCK  max_B |<d, R / s^2>_B| / |R / s|_B   its worst block (token, vocabulary tile, shard)

s^2 is the mean square deviation of the ensemble's members, plus the rounding of the output itself.
For a matrix, it is pooled: a product of row mean and column mean. A variance of each entry alone,
from a dozen members, would be far too uncertain. The weights 1 / s^2 make SCALE as sharp as it can
be (Aitken's generalised least squares).

Rounding may change a whole block alike: in a token mean the gradient of every label's logit is
nearly the same number, and is rounded alike. The ensemble does not show this, because its members
round each number for itself. An allowance for it is added to SCALE's limit, and subtracted from a
result's BLOCK.

Large outputs are read some rows at a time, so that no tensor holds a whole stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.judge.rows import Rows, Stack, at, some_rows

SCALE, NOISE, WORST = "scale", "noise", "worst"


@dataclass(frozen=True)
class Blocks:
    """One way to cut a tensor into blocks along a dim. Slice ``i`` is in block ``index[i]``."""

    name: str
    dim: int
    index: Tensor
    count: int


@dataclass(frozen=True)
class Statistic:
    """One statistic of a stack of results."""

    values: Tensor
    """The statistic of each result, ``[n]``."""
    where: Tensor | None = None
    """``[n]``: the number of the worst entry or block of each result."""


def statistics(
    deviations: Stack,
    reference: Tensor,
    precision: Stack,
    blocks: Sequence[Blocks],
    allowed: Mapping[str, Tensor] | None = None,
) -> dict[str, Statistic]:
    """Returns every statistic of a stack of results; for scalars SCALE only.

    Args:
        deviations: ``[n, *shape]``, results minus the reference.
        reference: ``[*shape]``.
        precision: 1 / s^2, ``[n, *shape]`` or ``[1, *shape]``.
        blocks: the ways to cut the output into blocks.
        allowed: the allowance for rounding alike; see ``alike_in_blocks``. By default 0.
    """
    pull, size = _Sums(reference, blocks), _Sums(reference, blocks)
    total = noisy = torch.zeros((), dtype=torch.float64)
    worst, entries = torch.full((), -1.0, dtype=torch.float64), torch.zeros((), dtype=torch.long)
    for rows in some_rows(reference.shape):
        deviation, weight = deviations(rows), precision(rows)
        known = at(reference, rows)
        weighted = known * weight
        pull.add(rows, deviation * weighted)
        size.add(rows, known * weighted)
        if not reference.dim():
            continue
        squares = (deviation.square() * weight).flatten(1)
        noisy = noisy + (weight > 0).flatten(1).sum(1)
        total = total + squares.sum(1)
        largest, entry = squares.max(1)
        if rows.start:
            entry = entry + rows.start * reference[0].numel()  # its number in the whole output
        entries, worst = torch.where(largest > worst, entry, entries), torch.maximum(worst, largest)
    found = {SCALE: Statistic(_ratio(pull.total, size.total))}
    if not reference.dim():
        return found
    found[NOISE] = Statistic((total / noisy.clamp(min=1)).sqrt())
    found[WORST] = Statistic(worst.sqrt(), entries)
    for cut in blocks:
        off = pull.of_blocks(cut).abs() - (0.0 if allowed is None else allowed[cut.name])
        most, block = _ratio(off, size.of_blocks(cut).sqrt()).max(1)
        found[cut.name] = Statistic(most.clamp(min=0), block)
    return found


def alike_in_blocks(stack: Stack, reference: Tensor, precision: Stack, blocks: Sequence[Blocks]) -> dict[str, Tensor]:
    """Returns the allowance for rounding that changes all entries of a block alike: the largest
    absolute value of ``<d, R / s^2>`` over changes d, ``[blocks]``, by the name of the cut.

    Args:
        stack: ``[n, *shape]``: n possible changes, each to all entries of a block at once.
        reference: ``[*shape]``.
        precision: 1 / s^2, ``[1, *shape]``.
        blocks: the ways to cut the output into blocks.
    """
    pull = _Sums(reference, blocks)
    for rows in some_rows(reference.shape):
        pull.add(rows, stack(rows) * at(reference, rows) * precision(rows))
    return {cut.name: pull.of_blocks(cut).abs().amax(0) for cut in blocks}


class _Sums:
    """Sums of a stack of results over all entries, and over the entries of each block.

    The memory for the sums is taken at once. Small tensors that are made later would stay between
    the large ones that are freed, and memory would grow.
    """

    def __init__(self, reference: Tensor, blocks: Sequence[Blocks]) -> None:
        self._dims = {cut.dim for cut in blocks}
        self._shape, self._slices = reference.shape, dict[int, Tensor]()
        self._matrix = reference.dim() > 1
        self.total = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Rows, stack: Tensor) -> None:
        """Adds some rows ``[n, rows, ...]``."""
        self.total = self.total + (stack.flatten(1).sum(1) if stack.dim() > 1 else stack)
        for dim in self._dims:
            if dim not in self._slices:
                self._slices[dim] = stack.new_zeros(len(stack), self._shape[dim])
            some = rows if dim == 0 else slice(None)
            self._slices[dim][:, some] += stack.sum(2 - dim) if self._matrix else stack

    def of_blocks(self, cut: Blocks) -> Tensor:
        """Returns the sum of each block, ``[n, blocks]``."""
        slices = self._slices[cut.dim]
        return slices.new_zeros(len(slices), cut.count).index_add_(1, cut.index, slices)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Returns the ratio, or 0 where the denominator is not positive."""
    return torch.where(below > 0, above / below, 0.0)
