# SPDX-License-Identifier: Apache-2.0
"""Compares results on one problem with the reference, given the noise that a correct kernel may
have.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.placement import PlacedProblem
from lossgate.cases.rank_parts import RankParts, rank_parts
from lossgate.declaration.candidate import Candidate
from lossgate.judge.blocks import blocks_of
from lossgate.judge.comparison import Comparison, Entry
from lossgate.judge.ensemble import stages_of
from lossgate.judge.tolerance import Tolerance
from lossgate.numerics.float_formats import FLOAT32, FloatFormat, coarsest, float_format_of
from lossgate.specs.outputs import Output


class Oracle:
    """Judges any tensor as an output of one candidate on one problem."""

    def __init__(self, candidate: Candidate, placed: PlacedProblem, returned: Collection[Output]) -> None:
        """Prepares to judge the outputs of a candidate on a problem.

        Args:
            candidate: the candidate, which declares its precision.
            placed: the problem on its layout.
            returned: the outputs that the candidate returns. Gradients are judged in any case.
        """
        self._candidate, self._placed, self._bound = candidate, placed, placed.bound
        self._returned = frozenset(returned)
        self._stages = stages_of(candidate, placed.problem.dtype)
        self._tolerances: dict[Any, Tolerance] = {}

    @property
    def gradients(self) -> tuple[Output, ...]:
        """The gradients that the candidate must give."""
        return tuple(self._candidate.starts_at.gradients(self._bound.batch.leaves).values())

    @cached_property
    def reference(self) -> Mapping[Output, Tensor]:
        """The reference outputs, in float64."""
        return self._bound.reference(self._returned)

    @cached_property
    def deviations(self) -> Mapping[Output, Tensor]:
        """Each output of correct but rounded runs, less the reference, ``[members, *shape]``."""
        found = self._bound.noise.deviations(self._placed.partition, self._stages, self._returned, self.reference)
        with_parts = {
            output: found[output] + parts.noise(len(found[output])) for output, parts in self._rank_parts.items()
        }
        return {**found, **with_parts}

    @cached_property
    def _rank_parts(self) -> Mapping[Output, RankParts]:
        """The parts of numbers that the ranks round."""
        return rank_parts(self._candidate, self._placed, self._stages, self._returned, self.reference)

    @cached_property
    def _alike(self) -> Mapping[Output, Tensor]:
        """Each output of runs that round equal numbers alike, less the reference."""
        return self._bound.noise.alike(self._placed.partition, self._stages, self._returned, self.reference)

    def compare(self, output: Output, result: Tensor, dtype: torch.dtype, faults: tuple[str, ...] = ()) -> Comparison:
        """Compares a whole float64 result, which was returned in ``dtype``, with the reference."""
        compared = self.compared(output)
        result = without_overflow(result, self.reference[output], dtype)
        rows = result if compared is None else result[compared]
        found = self._tolerance(output, dtype).compare(rows, faults)
        if found.margin <= 1:
            return found
        return replace(found, farthest=farthest(output, result, self.reference[output], compared))

    def would_agree(
        self, output: Output, result: Tensor, dtype: torch.dtype, other: Tensor, own_runs: Tensor | None = None
    ) -> bool:
        """Returns whether a result would agree if another tensor were the reference.

        Unless the noise around the other tensor is given, it is that of the reference. This noise
        is scaled up if the other tensor is larger. A tensor of zeros has no scale, by which any
        number would pass. So around zeros a result must be as small as noise.

        Args:
            output: the output that the result is of.
            result: the whole result in float64.
            dtype: the dtype in which it was returned.
            other: the tensor in place of the reference.
            own_runs: the deviations of right kernels from ``other``, ``[members, *shape]``, if
                they are known.
        """
        compared = self.compared(output)
        runs = self.deviations[output] if own_runs is None else own_runs
        given = result, self.reference[output], other, runs
        result, own, other, runs = given if compared is None else tuple(x[..., compared] for x in given)
        if not result.numel():
            return True
        if not _same_kind(result, other):
            return False
        finite = other.isfinite() & own.isfinite()
        largest, own_largest = (float(torch.where(finite, x, 0.0).abs().max()) for x in (other, own))
        scale = max(1.0, largest / own_largest) if own_largest and own_runs is None else 1.0
        runs = torch.where(finite, runs, 0.0) * scale
        noise = float(runs.abs().max())
        off = float(torch.where(other.isfinite(), result - other, 0.0).abs().max())
        format_ = float_format_of(dtype)
        if off > _FAR * (noise + format_.unit * largest):
            return False
        if not largest:
            return off <= _NEAR * noise
        blocks = blocks_of(output, self._placed.partition, self._candidate.tiles, compared)
        sizes = (other.abs() + largest * (other != 0)).masked_fill(~finite, 0.0)
        tolerance = Tolerance(
            output,
            torch.where(other.isnan(), 0.0, other),
            runs + _SUMS * _spread(runs) * sizes,
            unit=format_.unit,
            rounding=format_.error,
            alike=self.alike_format(output, dtype).error,
            rounded=format_.nearest,
            knows_noise=self.knows_noise(output),
            blocks=blocks,
        )
        return tolerance.compare(torch.where(result.isnan(), 0.0, result)).agrees

    def rejects(self, output: Output, results: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns for each of ``[n, *shape]`` results whether it disagrees with the reference
        output, ``[n]`` bool.
        """
        compared = self.compared(output)
        return self._tolerance(output, dtype).rejects(results if compared is None else results[:, compared])

    def compared(self, output: Output) -> Tensor | None:
        """Returns a mask of the tokens that are compared; None for all."""
        return self._bound.batch.fields["mask"] if output.kind == "token value" else None

    def alike_format(self, output: Output, dtype: torch.dtype) -> FloatFormat:
        """Returns the coarsest format to which all entries of an output may be rounded alike."""
        of_gradient = (self._stages.dlogits, self._stages.gradients, self._stages.loss)
        stages = of_gradient if output.kind == "gradient" else ()
        return coarsest(float_format_of(dtype), *stages)

    def alike_runs(self, output: Output) -> Tensor | None:
        """Returns an output of runs that round equal numbers alike, less the reference,
        ``[n, *shape]``; None if there are no such runs.
        """
        return self._alike.get(output)

    def knows_noise(self, output: Output) -> bool:
        """Returns whether right kernels are at most as noisy in an output as the noisiest run.

        It is False for numbers that come from a loss in a coarse dtype. Each step of such a loss
        rounds, and kernels take other steps than the runs do.
        """
        return bool(output.dims) or self._stages.loss == FLOAT32

    def _tolerance(self, output: Output, dtype: torch.dtype) -> Tolerance:
        """Returns the tolerance of an output that is returned in ``dtype``.

        The tolerance of a number is the same on every layout, unless the ranks round their parts.
        So it is kept with the problem.
        """
        everywhere = not output.dims and output not in self._rank_parts
        kept = self._bound.tolerances if everywhere else self._tolerances
        key = (output, dtype, self._stages, self._returned) if everywhere else (output, dtype)
        if key not in kept:
            kept[key] = self._make_tolerance(output, dtype)
        return kept[key]

    def _make_tolerance(self, output: Output, dtype: torch.dtype) -> Tolerance:
        compared, reference = self.compared(output), self.reference[output]
        format_, alike_runs = float_format_of(dtype), self.alike_runs(output)

        def of_compared(x: Tensor) -> Tensor:
            return x if compared is None else x[..., compared]

        return Tolerance(
            output,
            of_compared(reference),
            of_compared(self.deviations[output]),
            unit=format_.unit,
            rounding=format_.error,
            alike=self.alike_format(output, dtype).error,
            alike_runs=None if alike_runs is None else of_compared(alike_runs),
            rounded=format_.nearest,
            knows_noise=self.knows_noise(output),
            blocks=blocks_of(output, self._placed.partition, self._candidate.tiles, compared),
        )


_FAR = 32.0
"""A result disagrees if any entry is off by more than this many times the largest noise."""
_NEAR = 8.0
"""A result may be noise around 0 if no entry is larger than this many times the largest noise."""
_SUMS = 2.0**-22
"""The relative error by sums in float32 of another tensor than the reference. It is added to the
noise, because the other tensor may have sums where the reference has none."""


_LARGER = 1.01
"""Relative differences that are not so many times larger are told as the same."""


def farthest(output: Output, got: Tensor, want: Tensor, compared: Tensor | None) -> tuple[Entry, ...]:
    """Returns the entry with the greatest absolute difference, then that with the greatest relative
    difference if that is larger.

    Args:
        output: names the dims.
        got, want: the whole output, and the reference.
        compared: the rows that are compared, bool; None for all.
    """
    off = (got - want).abs().nan_to_num(nan=torch.inf)
    off = off.masked_fill((got == want) | (got.isnan() & want.isnan()), 0.0)  # also equal infinities and NaNs
    if compared is not None:
        off[~compared] = 0.0
    relative = torch.where(want == 0, 0.0, off / want.abs())
    numbers = [int(off.argmax())]
    if _LARGER * float(relative.flatten()[numbers[0]]) < float(relative.max()):
        numbers.append(int(relative.argmax()))
    return tuple(
        Entry(_place(output, number, got.shape), float(got.flatten()[number]), float(want.flatten()[number]))
        for number in numbers
    )


def _place(output: Output, number: int, shape: torch.Size) -> str:
    """Returns the place of an entry in words, such as "vocab 3, hidden 0"."""
    indices = torch.unravel_index(torch.tensor(number), shape) if shape else ()
    return ", ".join(f"{dim} {int(index)}" for dim, index in zip(output.dims, indices, strict=True))


def _same_kind(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are NaN and infinite at the same entries."""
    finite = one.isfinite()
    alike = torch.equal(finite, other.isfinite()) and torch.equal(one.isnan(), other.isnan())
    return alike and bool((finite | one.isnan() | (one == other)).all())


def _spread(runs: Tensor) -> Tensor:
    """Returns random numbers from -1 to 1 in the shape of some runs, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(runs.shape, generator=generator, dtype=torch.float64) * 2 - 1


def without_overflow(result: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Replaces infinities by the reference where the dtype can hardly hold the number.

    Perplexities of very unlikely sequences are that large. Float16 counts as able to hold all
    numbers up to half of its largest, because problems leave room for sums of usual numbers.
    """
    share = 0.5 if dtype == torch.float16 else 2.0**-20
    huge = reference.abs() > torch.finfo(dtype).max * share
    overflowed = huge & result.isinf() & (result.sign() == reference.sign())
    return torch.where(overflowed, reference, result)
