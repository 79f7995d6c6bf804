# SPDX-License-Identifier: Apache-2.0
"""Compares a result with the reference, given the noise of correct runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lossgate.judge.comparison import Comparison
from lossgate.judge.limits import ALIKE_FACTOR, Limits, NoiseModel, limits, noise_of
from lossgate.judge.rows import Rows, Stack, at, fits_at_once, kept_if_small, stack_of
from lossgate.judge.statistics import SCALE, WORST, Blocks, Statistic, alike_in_blocks, statistics
from lossgate.specs.outputs import Output

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


class Tolerance:
    """The results that are allowed for one output of one problem, given the noise of correct runs.

    The limits are computed once, and any number of results are held to them.
    """

    def __init__(
        self,
        output: Output,
        reference: Tensor,
        deviations: Tensor,
        *,
        unit: float,
        rounding: Callable[[Tensor], Tensor],
        alike: Callable[[Tensor], Tensor],
        alike_runs: Tensor | None = None,
        rounded: Callable[[Tensor], Tensor] | None = None,
        knows_noise: bool = True,
        blocks: Sequence[Blocks] = (),
    ) -> None:
        """Prepares to compare results with a reference. All tensors are float64.

        Args:
            output: the output that the results are of.
            reference: the reference, in the shape of each result.
            deviations: ``[M, *shape]``, correct but rounded runs, less the reference. May be
                float32.
            unit: unit roundoff of the output's dtype.
            rounding: returns the most by which rounding the output changes each entry.
            alike: returns the most by which rounding changes each entry if it changes all entries
                alike.
            alike_runs: ``[n, *shape]``, runs whose only errors are that they round equal numbers
                alike, less the reference; None if there are none. May be float32.
            rounded: rounds numbers to the output's dtype; None for the difference of two kernels.
            knows_noise: whether right kernels are at most as noisy as the noisiest run.
            blocks: the ways to cut the output into blocks.
        """
        self._rounded, self._knows_noise = rounded, knows_noise
        self._output, self._reference, self._unit, self._blocks = output, reference, unit, blocks
        self._finite = reference.isfinite()
        self._all_finite = bool(self._finite.all())
        self._known = self._zeroed(reference)
        deviations = self._zeroed(deviations)
        low, high = deviations.amin(0), deviations.amax(0)
        self._exactly_zero = (self._known == 0) & (low == 0) & (high == 0)
        self.vacuous = bool(self._exactly_zero.all()) or bool(low.isnan().any())
        """Whether nothing can be compared: every entry is exactly zero in every run; or a run has a
        NaN where the reference is finite, as if float32 overflows, and then no limit is known."""
        if not self.vacuous:
            sizes = self._known.abs().max(), -low.min().double(), high.max().double()
            self._size = float(torch.stack(sizes).max())
            own_rounding, self._alike = _errors(self._known, self._exactly_zero, self._size, rounding, alike)
            self._model = NoiseModel(self._known / self._size, deviations, own_rounding, self._size)
            self._alike_runs = None if alike_runs is None else self._zeroed(alike_runs)

    def _zeroed(self, x: Tensor) -> Tensor:
        """Sets the entries to 0 whose reference is infinite, such as the log-probability of a label
        that a filter leaves out.
        """
        return x if self._all_finite else torch.where(self._finite, x, 0.0)

    @cached_property
    def _limits(self) -> Limits:
        return limits(self._model, self._blocks, self._allowed, self._off_alike, self._off_rounded)

    def _off_alike(self, rows: Rows) -> Tensor:
        """Returns the deviations of the runs that round equal numbers alike, for some rows."""
        if self._alike_runs is None:
            return torch.zeros_like(at(self._model.reference, rows))[None]
        return stack_of(self._alike_runs)(rows) / self._size

    def _off_rounded(self, rows: Rows) -> Tensor:
        """Returns the deviation of the reference rounded to the output's dtype, for some rows."""
        known = at(self._known, rows)
        off = torch.zeros_like(known) if self._rounded is None else self._rounded(known) - known
        return torch.where(off.isfinite(), off, 0.0)[None] / self._size

    def _alike_at_most(self, rows: Rows) -> Tensor:
        """Returns the possible changes of some rows by rounding that changes all entries alike,
        ``[n, rows, ...]``.
        """
        alike = self._alike(rows) * at(self._model.reference, rows).sign()
        return torch.cat([alike[None], ALIKE_FACTOR * self._off_alike(rows)])

    @cached_property
    def _allowed(self) -> float:
        """The largest relative change of the whole output by rounding alike."""
        off = statistics(self._alike_at_most, self._model.reference, self._precision, ())[SCALE]
        return float(off.values.abs().max())

    @cached_property
    def _allowed_in_blocks(self) -> dict[str, Tensor]:
        return alike_in_blocks(self._alike_at_most, self._model.reference, self._precision, self._blocks)

    @cached_property
    def _precision(self) -> Stack:
        """1 / s^2, ``[1, *shape]``. It is kept if the output is small."""
        precision = self._model.precision
        return stack_of(precision(slice(None))) if fits_at_once(self._reference.shape) else precision

    def compare(self, result: Tensor, faults: tuple[str, ...] = ()) -> Comparison:
        """Compares a result with the reference.

        Args:
            result: a tensor of the reference's shape.
            faults: the faults that are already known, in words.
        """
        if not self._all_finite:
            if wrong := int((result[~self._finite] != self._reference[~self._finite]).sum()):
                faults = (*faults, f"{wrong} of {result.numel()} entries should be infinite, but are not")
            result = self._zeroed(result)
        if not bool(result.isfinite().all()):
            if result.numel() == 1:
                fault = f"{'NaN' if result.isnan().all() else 'infinite'}; the reference is finite"
            else:
                count = int((~result.isfinite()).sum())
                fault = f"{count} of {result.numel()} entries are not finite; the reference is finite there"
            return Comparison(output=self._output, faults=(*faults, fault), manner="not finite")
        leaked = result[self._exactly_zero]
        if leaks := int((leaked != 0).sum()):
            largest = float(leaked.abs().max())
            fault = f"{leaks} of {result.numel()} entries should be exactly zero, but are up to {largest:.3g}"
            faults = (*faults, fault)
        if self.vacuous:
            return Comparison(output=self._output, faults=faults, vacuous=True)
        return self._measure(result, faults)

    def _measure(self, result: Tensor, faults: tuple[str, ...]) -> Comparison:
        """Measures a result, together with copies in which errors are planted."""
        if not result.dim():
            return self._measure_number(float(result / self._size), faults)
        limit = self._limits.of
        planted = plant(self._model.reference, self._blocks) if self._model.says_something else {}

        def results(rows: Rows) -> Tensor:
            some = result[rows] / self._size
            return torch.stack([some, *(error.put(some, rows) for error in planted.values())])

        found = self._statistics(results)  # of the result itself at 0, and of the planted errors from 1 on
        values = {name: float(statistic.values[0]) for name, statistic in found.items()}
        over = self._over(found)
        rejected = {name: bool(over[i]) for i, name in enumerate(planted, 1)}
        scales = {name: float(found[SCALE].values[i]) for i, name in enumerate(planted, 1)}
        where = ((name, s.where) for name, s in found.items() if s.where is not None)
        return Comparison(
            output=self._output,
            values=values,
            limits=limit,
            where={name: _number(int(entries[0]), name, self._reference) for name, entries in where},
            sd=self._limits.sd,
            mean=self._limits.mean,
            noise=self._in_units_of_noisiest(float(noise_of(found)[0])),
            unit=self._unit,
            faults=faults,
            vacuous=not planted,
            rejected=rejected,
            blind=blind_spots(scales, rejected, values[SCALE], limit[SCALE]),
        )

    def _measure_number(self, result: float, faults: tuple[str, ...]) -> Comparison:
        """Measures a number as ``_measure`` measures tensors, in far less time. Its only statistic
        is SCALE. ``result`` is already divided by ``_size``.
        """
        limits, known = self._limits, float(self._model.reference)
        weight = known * float(self._precision(slice(None)))
        size = known * weight  # 0 if there is no noise, or nearly nothing but noise

        def scale_of(value: float) -> float:
            return (value - known) * weight / size if size > 0 else 0.0

        planted = {"x1.01": result * 1.01, "x0.99": result * 0.99, "zero": 0.0} if self._model.says_something else {}
        scales = {name: scale_of(value) for name, value in planted.items()}
        scale = scale_of(result)
        rejected = {name: abs(value) > limits.of[SCALE] for name, value in scales.items()}
        return Comparison(
            output=self._output,
            values={SCALE: scale},
            limits=limits.of,
            sd=limits.sd,
            mean=limits.mean,
            noise=self._in_units_of_noisiest(abs(scale)),
            unit=self._unit,
            faults=faults,
            vacuous=not planted,
            rejected=rejected,
            blind=blind_spots(scales, rejected, scale, limits.of[SCALE]),
        )

    def _in_units_of_noisiest(self, noise: float) -> float | None:
        noisiest = self._limits.noise
        return noise / noisiest if noisiest and self._knows_noise else None

    def rejects(self, results: Tensor) -> Tensor:
        """Returns for each of ``[n, *shape]`` results whether ``compare`` would disagree, ``[n]``
        bool.
        """
        flat = results.reshape(len(results), -1)
        finite, zero = self._finite.flatten(), self._exactly_zero.flatten()
        wrong_infinity = (flat[:, ~finite] != self._reference.flatten()[~finite]).any(1)
        not_finite = ~flat[:, finite].isfinite().all(1)
        not_zero = (flat[:, zero & finite] != 0).any(1)
        faulty = wrong_infinity | not_finite | not_zero
        if self.vacuous:
            return faulty
        return faulty | self._over(self._statistics(stack_of(self._zeroed(results) / self._size)))

    def _statistics(self, results: Stack) -> dict[str, Statistic]:
        reference, precision = self._model.reference, self._precision

        def deviations(rows: Rows) -> Tensor:
            return results(rows) - at(reference, rows)

        return statistics(deviations, reference, precision, self._blocks, self._allowed_in_blocks)

    def _over(self, found: Mapping[str, Statistic]) -> Tensor:
        """Returns for each result whether a statistic is over its limit, ``[n]`` bool."""
        limit = self._limits.of
        # A NaN is over its limit, so this is not written as >.
        return torch.stack([~(s.values.abs() <= limit[name]) for name, s in found.items()]).any(0)


def _errors(
    reference: Tensor,
    exactly_zero: Tensor,
    size: float,
    rounding: Callable[[Tensor], Tensor],
    alike: Callable[[Tensor], Tensor],
) -> tuple[Callable[[Rows], Tensor], Callable[[Rows], Tensor]]:
    """Returns two functions that compute the two kinds of error for some rows of a reference.

    Errors are divided by ``size``. A number that is always zero is not rounded. This is no method:
    a ``Tolerance`` would then refer to itself, and its memory would stay until Python looks for
    cycles.
    """

    def of_each(rows: Rows) -> Tensor:
        return torch.where(at(exactly_zero, rows), 0.0, rounding(at(reference, rows)) / size)

    def of_all(rows: Rows) -> Tensor:
        return alike(at(reference, rows)) / size

    return kept_if_small(of_each, reference.shape), kept_if_small(of_all, reference.shape)


def _number(index: int, statistic: str, reference: Tensor) -> str:
    """Returns an index as people write it: row and column for an entry of a matrix."""
    if statistic == WORST and reference.dim() == 2:
        return f"{index // reference.shape[1]}, {index % reference.shape[1]}"
    return str(index)
