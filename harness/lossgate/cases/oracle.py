# SPDX-License-Identifier: Apache-2.0
"""What results on one problem are compared with: the reference, and the noise that a correct kernel
may have.
"""

from collections.abc import Collection, Mapping
from functools import cached_property

import torch
from torch import Tensor

from lossgate.cases.bound_problem import BoundProblem
from lossgate.declaration.candidate import Candidate
from lossgate.judge.blocks import blocks_of
from lossgate.judge.comparison import Comparison, compare
from lossgate.judge.ensemble import run_ensemble
from lossgate.numerics.float_formats import FLOAT_FORMATS, float_format_of
from lossgate.specs.outputs import Output


class Oracle:
    """Judges any tensor as an output of one candidate on one problem."""

    def __init__(self, candidate: Candidate, bound: BoundProblem, returned: Collection[Output]) -> None:
        """Prepares to judge the outputs of a candidate on a problem.

        Args:
            candidate: says in which precision it computes.
            bound: the problem.
            returned: the outputs that the candidate returns; its gradients are judged in any case.
        """
        self.bound, self._candidate, self._returned = bound, candidate, returned

    @property
    def gradients(self) -> tuple[Output, ...]:
        """The gradients that the candidate must give."""
        return tuple(self._candidate.starts_at.gradients(self.bound.batch.leaves).values())

    @cached_property
    def reference(self) -> Mapping[Output, Tensor]:
        """The reference outputs, in float64."""
        return self.bound.reference(self._returned)

    @cached_property
    def noise(self) -> Mapping[Output, Tensor]:
        """Every output as correct but rounded runs give it, ``[members, *shape]``."""
        return run_ensemble(
            self._candidate, self.bound.problem, self.bound.batch, self.bound.bound_spec.returning(self._returned)
        )

    def compare(self, output: Output, result: Tensor, dtype: torch.dtype, faults: tuple[str, ...] = ()) -> Comparison:
        """Compares a whole float64 tensor, which came in ``dtype``, with the reference output."""
        precision, batch = self._candidate.precision[self.bound.problem.dtype], self.bound.batch
        reference, noise = self.reference[output], self.noise[output]
        trained = batch.fields["mask"] if output.kind == "token value" else None
        if trained is not None:
            result, reference, noise = result[trained], reference[trained], noise[:, trained]
        unit = float_format_of(dtype).unit
        on_the_way = (precision.dlogits, precision.loss) if output.kind == "gradient" else ()
        return compare(
            output,
            _without_overflow(result, reference, dtype),
            reference,
            noise,
            unit=unit,
            allowed=max([unit, *(FLOAT_FORMATS[dtype].unit for dtype in on_the_way)]),
            blocks=blocks_of(output, batch, self._candidate.tiles, trained),
            faults=faults,
        )


def _without_overflow(result: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Replaces infinities by the reference where the dtype can hardly hold the number.

    Perplexities of hopeless sequences are that large.
    """
    huge = reference.abs() > torch.finfo(dtype).max * 2.0**-20
    return torch.where(huge & result.isinf() & (result.sign() == reference.sign()), reference, result)
