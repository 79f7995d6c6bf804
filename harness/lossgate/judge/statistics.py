# SPDX-License-Identifier: Apache-2.0
"""Deviations from the reference, in units of the noise that a correct kernel may have.

R is the reference, E_m the ensemble's members, K a result, d = K - R, and s the noise of each
entry. All statistics are computed for a stack of results at once, along the first dim.

    SCALE  <d, R / s^2> / <R, R / s^2>          by how much the whole is too large
    NOISE  rms(d / s)                           how noisy it is
    WORST  max |d / s|                          its worst entry
    BLOCK  max_B |<d, R / s^2>_B| / |R / s|_B   its worst block (token, vocabulary tile, shard)

s^2 is the members' mean square deviation, pooled over rows and columns for a matrix (a product of
row mean and column mean: a dozen members alone would give each entry a variance of its own that is
far too uncertain), plus the rounding of the output itself. Weighting SCALE by it makes it as sharp
as it can be (Aitken's generalised least squares).

Rounding may do the same to a whole block: in a token mean the gradient of every label's logit is
nearly the same number, and is rounded alike. The ensemble's members each round for themselves and
do not show it. So one unit roundoff is allowed for it: it is added to SCALE's limit, and subtracted
from a result's BLOCK.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCALE, NOISE, WORST = "scale", "noise", "worst"

FACTORS: Mapping[str, float] = {NOISE: 2.5, WORST: 3.0}
BLOCK_FACTOR = 3.0
"""Limits: these factors of the largest value among the members. With them, and ``scale_sigmas``, no
correct kernel of ``benchmarks/calibration.py`` is rejected; ``docs/judge.md`` has its figures."""

ALIKE_FACTOR = 1.5
"""What a kernel may deviate by is at least this factor of what the runs do that round equal numbers
alike: it does nearly what one of them does."""

_TINY = 1e-200
"""Squares below this are taken for zero; results are scaled so that the largest is 1."""


@dataclass(frozen=True)
class Blocks:
    """One way to cut a tensor into blocks along a dim. Slice ``i`` is in block ``index[i]``."""

    name: str
    dim: int
    index: Tensor
    count: int


@dataclass(frozen=True)
class NoiseModel:
    """The deviations of an ensemble of correct runs in one output."""

    reference: Tensor
    deviations: Tensor
    """``[M, *shape]``: each member minus the reference."""
    rounding: Tensor
    """``[*shape]``: the most that rounding the output itself changes each entry."""

    @property
    def members(self) -> int:
        return len(self.deviations)

    @property
    def says_something(self) -> bool:
        """Whether the reference is not zero, nor so far below its noise that its square is."""
        return float(self.reference.abs().max()) ** 2 >= _TINY

    def precision(self) -> Tensor:
        """Returns 1 / s^2 from every member, ``[1, *shape]``; 0 where there is no noise at all."""
        return self._pooled(self.deviations.square().sum(0, keepdim=True), self.members)

    def precision_without_each(self) -> Tensor:
        """Returns 1 / s^2 for each member from all others, ``[M, *shape]``.

        No member is judged by noise that it helped to make.
        """
        squares = self.deviations.square()
        return self._pooled(squares.sum(0) - squares, max(self.members - 1, 1))

    def _pooled(self, squares: Tensor, members: int) -> Tensor:
        """Returns 1 / s^2 from sums of squares over so many members, ``[n, *shape]``."""
        if squares.dim() == 3:
            rows, columns = squares.mean(2, keepdim=True), squares.mean(1, keepdim=True)
            grand = rows.mean(1, keepdim=True).clamp(min=_TINY)
            squares = (rows / grand) * columns
        variance = (self.rounding.square() / 3).add(squares, alpha=1 / members)
        return variance.masked_fill_(variance < _TINY, float("inf")).reciprocal_()


@dataclass(frozen=True)
class Statistic:
    """One statistic of a stack of results."""

    values: Tensor
    """``[n]``."""
    where: Tensor | None = None
    """``[n]``: the number of the worst entry or block of each result."""


def statistics(
    deviations: Tensor,
    reference: Tensor,
    precision: Tensor,
    blocks: Sequence[Blocks],
    allowed: Mapping[str, Tensor] | None = None,
) -> dict[str, Statistic]:
    """Returns every statistic of a stack of results; for scalars SCALE only.

    Args:
        deviations: ``[n, *shape]``, results minus the reference.
        reference: ``[*shape]``.
        precision: 1 / s^2, ``[n, *shape]`` or ``[1, *shape]``.
        blocks: the ways to cut the output into blocks.
        allowed: how large ``<d, R / s^2>`` of each block may be by rounding alike, ``[blocks]``, by
            the name of the cut; by default 0.
    """
    weighted = reference * precision
    pull, size = deviations * weighted, reference * weighted
    found = {SCALE: Statistic(_ratio(_total(pull), _total(size)))}
    if not reference.dim():
        return found
    squares = (deviations.square() * precision).flatten(1)
    noisy = (precision > 0).flatten(1).sum(1).clamp(min=1)
    found[NOISE] = Statistic((squares.sum(1) / noisy).sqrt())
    worst, entry = squares.max(1)
    found[WORST] = Statistic(worst.sqrt(), entry)
    slices: dict[int, tuple[Tensor, Tensor]] = {}
    for cut in blocks:
        if cut.dim not in slices:
            slices[cut.dim] = _sliced(pull, cut), _sliced(size, cut)
        block_pull, block_size = (_add_up(tensor, cut) for tensor in slices[cut.dim])
        off = block_pull.abs() - (0.0 if allowed is None else allowed[cut.name])
        worst, block = _ratio(off, block_size.sqrt()).max(1)
        found[cut.name] = Statistic(worst.clamp(min=0), block)
    return found


def alike_in_blocks(
    alike: Tensor, runs: Tensor, reference: Tensor, precision: Tensor, blocks: Sequence[Blocks]
) -> dict[str, Tensor]:
    """Returns how large ``<d, R / s^2>`` of each block may be by rounding alike, ``[blocks]``, by
    the name of the cut.

    Args:
        alike: ``[*shape]``, what rounding may do to each entry of a whole block alike.
        runs: ``[n, *shape]``, what it does in runs that round equal numbers alike.
        reference: ``[*shape]``.
        precision: 1 / s^2, ``[1, *shape]``.
        blocks: the ways to cut the output into blocks.
    """
    weighted = reference * precision
    stack = torch.cat([alike * weighted.abs(), runs * weighted * ALIKE_FACTOR])
    return {cut.name: _add_up(_sliced(stack, cut), cut).abs().amax(0) for cut in blocks}


def _total(stack: Tensor) -> Tensor:
    return stack.flatten(1).sum(1) if stack.dim() > 1 else stack


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Returns the ratio, and 0 where there is nothing to compare with."""
    return torch.where(below > 0, above / below, 0.0)


def _sliced(stack: Tensor, cut: Blocks) -> Tensor:
    """Sums ``[n, *shape]`` over all dims but the one that is cut, ``[n, slices]``."""
    others = [d for d in range(1, stack.dim()) if d != cut.dim + 1]
    return stack.sum(others) if others else stack


def _add_up(slices: Tensor, cut: Blocks) -> Tensor:
    """Sums ``[n, slices]`` to ``[n, blocks]``."""
    return slices.new_zeros(len(slices), cut.count).index_add_(1, cut.index, slices)


@dataclass(frozen=True)
class Limits:
    """What the ensemble says of each statistic."""

    of: Mapping[str, float]
    """The limit of each statistic."""
    sd: float
    """Root mean square of SCALE over the members."""
    mean: float
    """Mean of SCALE over the members."""


def limits(model: NoiseModel, blocks: Sequence[Blocks], allowed: float, alike: Tensor) -> Limits:
    """Returns the limit of each statistic.

    Args:
        model: of the noise.
        blocks: the ways to cut the output into blocks.
        allowed: what rounding may do to the whole output alike, relative to it.
        alike: ``[n, *shape]``, the deviations of runs that round equal numbers alike.
    """
    members = statistics(model.deviations, model.reference, model.precision_without_each(), blocks)
    sd = float(members[SCALE].values.square().mean().sqrt())
    limit = {
        name: FACTORS.get(name, BLOCK_FACTOR) * float(statistic.values.max()) for name, statistic in members.items()
    }
    for name, statistic in statistics(alike, model.reference, model.precision(), ()).items():
        limit[name] = max(limit[name], ALIKE_FACTOR * float(statistic.values.max()))
    limit[SCALE] = allowed + scale_sigmas(model.members) * sd
    return Limits(limit, sd, float(members[SCALE].values.mean()))


def scale_sigmas(members: int) -> float:
    """Returns how many standard deviations of SCALE are allowed: five, and more for few members.

    The standard deviation is itself estimated. With twelve members or more, the result is within a
    tenth of the quantile of Student's t at 1e-6.
    """
    return 5 * (1 + 8 / members)
