# SPDX-License-Identifier: Apache-2.0
"""The verdict on one output of one problem: a result against the reference and the noise of correct
runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from lossgate.judge.comparison import Comparison
from lossgate.judge.limits import ALIKE_FACTOR, Limits, NoiseModel, limits, noise_of
from lossgate.judge.power import blind_spots, plant
from lossgate.judge.rows import Rows, Stack, at, fits_at_once, kept_if_small, stack_of
from lossgate.judge.statistics import SCALE, WORST, Blocks, Statistic, alike_in_blocks, statistics
from lossgate.specs.outputs import Output


class Tolerance:
    """What one output of one problem may be, given the noise of correct runs.

    Its limits are computed once, and any number of results are held to them.
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
            output: what the results are.
            reference: its shape is that of each result.
            deviations: ``[M, *shape]``, correct but rounded runs, less the reference. May be
                float32.
            unit: unit roundoff of the output's dtype.
            rounding: returns the most that rounding the output changes entries of the reference.
            alike: returns what rounding may do to them and, in the same way, to all others.
            alike_runs: ``[n, *shape]``, runs that round equal numbers alike, and nothing else, less
                the reference; None if there are none. May be float32.
            rounded: returns numbers as the output's dtype holds them; None for a difference.
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
        self.vacuous = bool(self._exactly_zero.all())
        """Nothing is left to compare: every entry is exactly zero in every run."""
        if not self.vacuous:
            sizes = self._known.abs().max(), -low.min().double(), high.max().double()
            self._size = float(torch.stack(sizes).max())
            own_rounding, self._alike = _errors(self._known, self._exactly_zero, self._size, rounding, alike)
            self._model = NoiseModel(self._known / self._size, deviations, own_rounding, self._size)
            self._alike_runs = None if alike_runs is None else self._zeroed(alike_runs)

    def _zeroed(self, x: Tensor) -> Tensor:
        """Zeroes the entries whose reference is infinite, such as the log-probability of a label
        that a filter left out.
        """
        return x if self._all_finite else torch.where(self._finite, x, 0.0)

    @cached_property
    def _limits(self) -> Limits:
        return limits(self._model, self._blocks, self._allowed, self._off_alike, self._off_rounded)

    def _off_alike(self, rows: Rows) -> Tensor:
        """Returns how far some rows of runs are off that round equal numbers alike."""
        if self._alike_runs is None:
            return torch.zeros_like(at(self._model.reference, rows))[None]
        return stack_of(self._alike_runs)(rows) / self._size

    def _off_rounded(self, rows: Rows) -> Tensor:
        """Returns how far some rows of the reference are off that is only rounded at its end."""
        known = at(self._known, rows)
        off = torch.zeros_like(known) if self._rounded is None else self._rounded(known) - known
        return torch.where(off.isfinite(), off, 0.0)[None] / self._size

    def _alike_at_most(self, rows: Rows) -> Tensor:
        """Returns what rounding may do to some rows alike, in several ways."""
        alike = self._alike(rows) * at(self._model.reference, rows).sign()
        return torch.cat([alike[None], ALIKE_FACTOR * self._off_alike(rows)])

    @cached_property
    def _allowed(self) -> float:
        """What rounding may do to the whole output alike, relative to it."""
        off = statistics(self._alike_at_most, self._model.reference, self._precision, ())[SCALE]
        return float(off.values.abs().max())

    @cached_property
    def _allowed_in_blocks(self) -> dict[str, Tensor]:
        return alike_in_blocks(self._alike_at_most, self._model.reference, self._precision, self._blocks)

    @cached_property
    def _precision(self) -> Stack:
        """1 / s^2, ``[1, *shape]``: kept if it is small."""
        precision = self._model.precision
        return stack_of(precision(slice(None))) if fits_at_once(self._reference.shape) else precision

    def compare(self, result: Tensor, faults: tuple[str, ...] = ()) -> Comparison:
        """Compares a result with the reference.

        Args:
            result: of the reference's shape.
            faults: what is already known to be wrong, in words.
        """
        if not self._all_finite:
            if wrong := int((result[~self._finite] != self._reference[~self._finite]).sum()):
                faults = (*faults, f"{wrong} of {result.numel()} entries should be infinite, and are not")
            result = self._zeroed(result)
        if not bool(result.isfinite().all()):
            count = int((~result.isfinite()).sum())
            fault = f"{count} of {result.numel()} entries are not finite, where the reference is"
            return Comparison(output=self._output, faults=(*faults, fault))
        leaked = result[self._exactly_zero]
        if leaks := int((leaked != 0).sum()):
            largest = float(leaked.abs().max())
            fault = f"{leaks} of {result.numel()} entries should be exactly zero and are up to {largest:.3g}"
            faults = (*faults, fault)
        if self.vacuous:
            return Comparison(output=self._output, faults=faults, vacuous=True)
        return self._measure(result, faults)

    def _measure(self, result: Tensor, faults: tuple[str, ...]) -> Comparison:
        """Measures a result, and with it copies in which errors are planted."""
        if not result.dim():
            return self._measure_number(float(result / self._size), faults)
        limit = self._limits.of
        planted = plant(self._model.reference, self._blocks) if self._model.says_something else {}

        def results(rows: Rows) -> Tensor:
            some = result[rows] / self._size
            return torch.stack([some, *(error.put(some, rows) for error in planted.values())])

        found = self._statistics(results)
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
        """Does what ``_measure`` does for a number, which has SCALE alone, in far less time.

        It is scaled as the model's reference is.
        """
        limits, known = self._limits, float(self._model.reference)
        weight = known * float(self._precision(slice(None)))
        size = known * weight  # 0 if there is no noise, or nearly nothing but noise
        planted = {"x1.01": result * 1.01, "x0.99": result * 0.99, "zero": 0.0} if self._model.says_something else {}
        scales = {name: (value - known) * weight / size if size > 0 else 0.0 for name, value in planted.items()}
        scale = (result - known) * weight / size if size > 0 else 0.0
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
        known, zero = self._finite.flatten(), self._exactly_zero.flatten()
        wrong = (flat[:, ~known] != self._reference.flatten()[~known]).any(1)
        wrong |= ~flat[:, known].isfinite().all(1) | (flat[:, zero & known] != 0).any(1)
        results = self._zeroed(results)
        return wrong if self.vacuous else wrong | self._over(self._statistics(stack_of(results / self._size)))

    def _statistics(self, results: Stack) -> dict[str, Statistic]:
        reference, precision = self._model.reference, self._precision

        def deviations(rows: Rows) -> Tensor:
            return results(rows) - at(reference, rows)

        return statistics(deviations, reference, precision, self._blocks, self._allowed_in_blocks)

    def _over(self, found: Mapping[str, Statistic]) -> Tensor:
        limit = self._limits.of
        return torch.stack([~(s.values.abs() <= limit[name]) for name, s in found.items()]).any(0)


def _errors(
    reference: Tensor,
    exactly_zero: Tensor,
    size: float,
    rounding: Callable[[Tensor], Tensor],
    alike: Callable[[Tensor], Tensor],
) -> tuple[Callable[[Rows], Tensor], Callable[[Rows], Tensor]]:
    """Returns what computes both kinds of error for some rows of a reference, in units of a size.

    They hold no ``Tolerance``: that would hold itself, and its memory would stay until Python looks
    for cycles. A number that is always zero is not rounded.
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
