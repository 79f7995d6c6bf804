# SPDX-License-Identifier: Apache-2.0
"""What results on one problem are compared with: the reference, and the noise that a correct kernel
may have.
"""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lossgate.cases.placement import PlacedProblem
from lossgate.cases.rank_parts import RankParts, rank_parts
from lossgate.declaration.candidate import Candidate
from lossgate.judge.blocks import blocks_of
from lossgate.judge.comparison import Comparison
from lossgate.judge.ensemble import stages_of
from lossgate.judge.tolerance import Tolerance
from lossgate.numerics.float_formats import FLOAT32, FloatFormat, coarsest, float_format_of
from lossgate.specs.outputs import Output


class Oracle:
    """Judges any tensor as an output of one candidate on one problem."""

    def __init__(self, candidate: Candidate, placed: PlacedProblem, returned: Collection[Output]) -> None:
        """Prepares to judge the outputs of a candidate on a problem.

        Args:
            candidate: says in which precision it computes.
            placed: the problem on its layout.
            returned: the outputs that the candidate returns; its gradients are judged in any case.
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
        """Every output as correct but rounded runs give it, ``[members, *shape]``, less the
        reference.
        """
        found = self._bound.noise.deviations(self._placed.partition, self._stages, self._returned, self.reference)
        parts = {output: found[output] + of.noise(len(found[output])) for output, of in self._rank_parts.items()}
        return {**found, **parts}

    @cached_property
    def _rank_parts(self) -> Mapping[Output, RankParts]:
        """The parts of numbers that the ranks round."""
        return rank_parts(self._candidate, self._placed, self._stages, self._returned, self.reference)

    @cached_property
    def _alike(self) -> Mapping[Output, Tensor]:
        """The same of runs that round equal numbers alike."""
        return self._bound.noise.alike(self._placed.partition, self._stages, self._returned, self.reference)

    def compare(self, output: Output, result: Tensor, dtype: torch.dtype, faults: tuple[str, ...] = ()) -> Comparison:
        """Compares a whole float64 tensor, which came in ``dtype``, with the reference output."""
        compared = self.compared(output)
        result = without_overflow(result, self.reference[output], dtype)
        return self._tolerance(output, dtype).compare(result if compared is None else result[compared], faults)

    def would_agree(
        self, output: Output, result: Tensor, dtype: torch.dtype, other: Tensor, own_runs: Tensor | None = None
    ) -> bool:
        """Returns whether a result would agree, were another tensor the reference.

        The noise is that of the reference, and larger where the other is larger. A reference of 0
        has no scale, and lets any number pass. So next to 0 a result must be noise.

        Args:
            output: what the result is.
            result: whole, in float64.
            dtype: in which it came.
            other: what stands in place of the reference.
            own_runs: the noise of right kernels of the other, ``[members, *shape]``, if it is
                known.
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
        largest, was = (float(torch.where(finite, x, 0.0).abs().max()) for x in (other, own))
        larger = max(1.0, largest / was) if was and own_runs is None else 1.0
        runs = torch.where(finite, runs, 0.0) * larger
        noise = float(runs.abs().max())
        off = float(torch.where(other.isfinite(), result - other, 0.0).abs().max())
        format_ = float_format_of(dtype)
        if off > _FAR * (noise + format_.unit * largest):
            return False
        if not largest:
            return off <= _NEAR * noise
        blocks = blocks_of(output, self._placed.partition, self._candidate.tiles, compared)
        tolerance = Tolerance(
            output,
            torch.where(other.isnan(), 0.0, other),
            runs + _SUMS * _spread(runs) * (other.abs() + largest * (other != 0)).masked_fill(~finite, 0.0),
            unit=format_.unit,
            rounding=format_.error,
            alike=self.alike_format(output, dtype).error,
            rounded=format_.nearest,
            knows_noise=self.knows_noise(output),
            blocks=blocks,
        )
        return tolerance.compare(torch.where(result.isnan(), 0.0, result)).agrees

    def rejects(self, output: Output, results: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns which of ``[n, *shape]`` results disagree with the reference output, ``[n]``
        bool.
        """
        compared = self.compared(output)
        return self._tolerance(output, dtype).rejects(results if compared is None else results[:, compared])

    def compared(self, output: Output) -> Tensor | None:
        """Returns which tokens count; None for all."""
        return self._bound.batch.fields["mask"] if output.kind == "token value" else None

    def alike_format(self, output: Output, dtype: torch.dtype) -> FloatFormat:
        """Returns the format to which each entry of an output may be rounded, and in the same way
        all others.
        """
        stages = (self._stages.dlogits, self._stages.loss) if output.kind == "gradient" else ()
        return coarsest(float_format_of(dtype), *stages)

    def alike_runs(self, output: Output) -> Tensor | None:
        """Returns an output as runs give it that round equal numbers alike, ``[n, *shape]``, less
        the reference; None if there are none.
        """
        return self._alike.get(output)

    def knows_noise(self, output: Output) -> bool:
        """Returns whether right kernels are at most as noisy in an output as the noisiest run.

        A loss in a coarse dtype rounds every step, and kernels take other steps than the runs do.
        """
        return bool(output.dims) or self._stages.loss == FLOAT32

    def _tolerance(self, output: Output, dtype: torch.dtype) -> Tolerance:
        """Returns the tolerance of an output that comes in ``dtype``.

        That of a number is kept with the problem, because it is the same on every layout, unless
        the ranks round their parts.
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
"""A result that is so many times its largest noise off at any entry agrees with nothing."""
_NEAR = 8.0
"""What is so many times its largest noise may be noise around 0."""
_SUMS = 2.0**-22
"""What sums in float32 change in another computation, relative to its entries: it may add up where
the reference adds nothing."""


def _same_kind(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors are NaN and infinite at the same entries."""
    finite = one.isfinite()
    alike = torch.equal(finite, other.isfinite()) and torch.equal(one.isnan(), other.isnan())
    return alike and bool((finite | one.isnan() | (one == other)).all())


def _spread(runs: Tensor) -> Tensor:
    """Returns numbers from -1 to 1 in the shape of some runs, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(runs.shape, generator=generator, dtype=torch.float64) * 2 - 1


def without_overflow(result: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Replaces infinities by the reference where the dtype can hardly hold the number.

    Perplexities of hopeless sequences are that large. In float16 no sum of usual numbers may end in
    an infinity: problems leave room for it.
    """
    huge = reference.abs() > torch.finfo(dtype).max * (0.5 if dtype == torch.float16 else 2.0**-20)
    return torch.where(huge & result.isinf() & (result.sign() == reference.sign()), reference, result)
