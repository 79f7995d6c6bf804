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
do not show it. What is allowed for it is added to SCALE's limit, and subtracted from a result's
BLOCK.

Large outputs are read some rows at a time, so that no tensor of a whole stack is ever held.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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


def stack_of(tensor: Tensor) -> Stack:
    """Returns a stack whose tensor, ``[n, *shape]``, is there."""
    return lambda rows: (tensor[:, rows] if tensor.dim() > 1 else tensor).double()


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
    """``[M, *shape]``: each member minus the reference, times ``size``."""
    rounding: Tensor
    """``[*shape]``: the most that rounding the output itself changes each entry."""
    size: float = 1.0
    """What reference and rounding are divided by already."""

    @property
    def members(self) -> int:
        return len(self.deviations)

    @property
    def says_something(self) -> bool:
        """Whether the reference is not zero, nor so far below its noise that its square is."""
        return float(self.reference.abs().max()) ** 2 >= _TINY

    def of_members(self, rows: Rows) -> Tensor:
        """Returns some rows of the deviations, ``[M, rows, ...]``."""
        runs = stack_of(self.deviations)(rows)
        return runs if self.size == 1.0 else runs / self.size

    def precision(self, rows: Rows) -> Tensor:
        """Returns 1 / s^2 from every member, ``[1, rows, ...]``; 0 where there is no noise at
        all.
        """
        return self._precision(rows, self._squares, self.members)

    def precision_without_each(self, rows: Rows) -> Tensor:
        """Returns 1 / s^2 for each member from all others, ``[M, rows, ...]``.

        No member is judged by noise that it helped to make.
        """
        return self._precision(rows, self._squares_of_others, max(self.members - 1, 1))

    def _precision(self, rows: Rows, squares: Stack, members: int) -> Tensor:
        variance = (at(self.rounding, rows).square() / 3).add(squares(rows), alpha=1 / members)
        return variance.masked_fill_(variance < _TINY, float("inf")).reciprocal_()

    @cached_property
    def _squares(self) -> Stack:
        """The sums of squares over the members, ``[1, rows, ...]``."""
        if self.reference.dim() == 2:
            return _pooled(*(sums.sum(0, keepdim=True) for sums in self._sums))
        return stack_of(self.of_members(slice(None)).square().sum(0, keepdim=True))

    @cached_property
    def _squares_of_others(self) -> Stack:
        """The same over all members but one, ``[M, rows, ...]``."""
        if self.reference.dim() == 2:
            return _pooled(*(sums.sum(0, keepdim=True) - sums for sums in self._sums))
        squares = self.of_members(slice(None)).square()
        return stack_of(squares.sum(0) - squares)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """The sums of each member's squares over the columns of a matrix, ``[M, rows]``, and over
        its rows, ``[M, columns]``.
        """
        by_row: list[Tensor] = []
        by_column = self.reference.new_zeros(self.members, self.reference.shape[1])
        for rows in some_rows(self.reference.shape):
            squares = self.of_members(rows).square()
            by_row.append(squares.sum(2))
            by_column += squares.sum(1)
        return torch.cat(by_row, 1), by_column


def _pooled(by_row: Tensor, by_column: Tensor) -> Stack:
    """Returns squares of a matrix that are a product of row mean and column mean.

    Args:
        by_row: ``[n, rows]``, sums over the columns.
        by_column: ``[n, columns]``, sums over the rows.
    """
    of_row, of_column = by_row / by_column.shape[1], by_column / by_row.shape[1]
    of_row = of_row / of_row.mean(1, keepdim=True).clamp(min=_TINY)
    return lambda rows: of_row[:, rows, None] * of_column[:, None]


@dataclass(frozen=True)
class Statistic:
    """One statistic of a stack of results."""

    values: Tensor
    """``[n]``."""
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
        allowed: how large ``<d, R / s^2>`` of each block may be by rounding alike, ``[blocks]``, by
            the name of the cut; by default 0.
    """
    pull, size = _Sums(reference, blocks), _Sums(reference, blocks)
    total = noisy = torch.zeros((), dtype=torch.float64)
    worst: list[Tensor] = []
    entries: list[Tensor] = []
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
        worst.append(largest)
        entries.append(entry + rows.start * reference[0].numel() if rows.start else entry)
    found = {SCALE: Statistic(_ratio(pull.total, size.total))}
    if not reference.dim():
        return found
    found[NOISE] = Statistic((total / noisy.clamp(min=1)).sqrt())
    largest, part = torch.stack(worst, 1).max(1)
    found[WORST] = Statistic(largest.sqrt(), torch.stack(entries, 1).gather(1, part[:, None]).squeeze(1))
    for cut in blocks:
        off = pull.of_blocks(cut).abs() - (0.0 if allowed is None else allowed[cut.name])
        most, block = _ratio(off, size.of_blocks(cut).sqrt()).max(1)
        found[cut.name] = Statistic(most.clamp(min=0), block)
    return found


def alike_in_blocks(stack: Stack, reference: Tensor, precision: Stack, blocks: Sequence[Blocks]) -> dict[str, Tensor]:
    """Returns how large ``<d, R / s^2>`` of each block may be by rounding alike, ``[blocks]``, by
    the name of the cut.

    Args:
        stack: what rounding may do to each entry, in several ways, ``[n, *shape]``: to all entries
            of a block at once.
        reference: ``[*shape]``.
        precision: 1 / s^2, ``[1, *shape]``.
        blocks: the ways to cut the output into blocks.
    """
    pull = _Sums(reference, blocks)
    for rows in some_rows(reference.shape):
        pull.add(rows, stack(rows) * at(reference, rows) * precision(rows))
    return {cut.name: pull.of_blocks(cut).abs().amax(0) for cut in blocks}


class _Sums:
    """Sums of a stack of results over all entries, and over those of each block."""

    def __init__(self, reference: Tensor, blocks: Sequence[Blocks]) -> None:
        self._dims = {cut.dim for cut in blocks} if reference.dim() > 1 else set[int]()
        self._whole: list[Tensor] = []
        self._slices: dict[int, list[Tensor]] = {0: [], 1: []}
        self._matrix = reference.dim() > 1
        self.total = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Rows, stack: Tensor) -> None:
        """Adds some rows ``[n, rows, ...]``."""
        self.total = self.total + (stack.flatten(1).sum(1) if stack.dim() > 1 else stack)
        if not self._matrix:
            self._slices[0].append(stack)
            return
        for dim in self._dims:
            self._slices[dim].append(stack.sum(2 - dim))

    def of_blocks(self, cut: Blocks) -> Tensor:
        """Returns the sum of each block, ``[n, blocks]``."""
        parts = self._slices[cut.dim]
        slices = torch.cat(parts, 1) if cut.dim == 0 else torch.stack(parts).sum(0)
        return slices.new_zeros(len(slices), cut.count).index_add_(1, cut.index, slices)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Returns the ratio, and 0 where there is nothing to compare with."""
    return torch.where(below > 0, above / below, 0.0)


@dataclass(frozen=True)
class Limits:
    """What the ensemble says of each statistic."""

    of: Mapping[str, float]
    """The limit of each statistic."""
    sd: float
    """Root mean square of SCALE over the members."""
    mean: float
    """Mean of SCALE over the members."""
    noise: float
    """The largest NOISE of the runs, of those that round equal numbers alike, and of the rounded
    reference; for a number, the largest abs(SCALE)."""


def limits(model: NoiseModel, blocks: Sequence[Blocks], allowed: float, alike: Stack, rounded: Stack) -> Limits:
    """Returns the limit of each statistic.

    Args:
        model: of the noise.
        blocks: the ways to cut the output into blocks.
        allowed: what rounding may do to the whole output alike, relative to it.
        alike: ``[n, *shape]``, the deviations of runs that round equal numbers alike.
        rounded: ``[1, *shape]``, the deviation of the reference as the output's dtype holds it.
    """
    members = statistics(model.of_members, model.reference, model.precision_without_each, blocks)
    sd = float(members[SCALE].values.square().mean().sqrt())
    limit = {
        name: FACTORS.get(name, BLOCK_FACTOR) * float(statistic.values.max()) for name, statistic in members.items()
    }
    of_alike = statistics(alike, model.reference, model.precision, ())
    for name, statistic in of_alike.items():
        limit[name] = max(limit[name], ALIKE_FACTOR * float(statistic.values.max()))
    limit[SCALE] = allowed + scale_sigmas(model.members) * sd
    of_rounded = statistics(rounded, model.reference, model.precision, ())
    noise = max(float(noise_of(runs).max()) for runs in (members, of_alike, of_rounded))
    return Limits(limit, sd, float(members[SCALE].values.mean()), noise)


def noise_of(found: Mapping[str, Statistic]) -> Tensor:
    """Returns how noisy each result is, ``[n]``. A number has SCALE alone."""
    return found[NOISE].values if NOISE in found else found[SCALE].values.abs()


def scale_sigmas(members: int) -> float:
    """Returns how many standard deviations of SCALE are allowed: five, and more for few members.

    The standard deviation is itself estimated. With twelve members or more, the result is within a
    tenth of the quantile of Student's t at 1e-6, and with fewer it is that quantile.
    """
    return _QUANTILES.get(members, 5 * (1 + 8 / members))


_QUANTILES = dict(enumerate((636_620, 1000, 130.2, 49.5, 28.5, 20.1, 15.8, 13.3, 11.7, 10.6, 9.7), 1))
"""Those of Student's t at 1e-6, by the degrees of freedom."""
