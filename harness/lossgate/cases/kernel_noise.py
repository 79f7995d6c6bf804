# SPDX-License-Identifier: Apache-2.0
"""The deviations of right kernels from the reference on one problem, on any layout.

An ensemble of runs rounds each number for itself. Other runs, on a grid, round equal numbers alike.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from lossgate.cases.large import is_large, size_of
from lossgate.judge.ensemble import Ensemble, gradient_on, rounded_runs, run_ensemble
from lossgate.judge.streamed import run_streamed, runs_of
from lossgate.numerics.float_formats import FLOAT32, FloatFormat
from lossgate.numerics.noise import Noise, power_of_two
from lossgate.numerics.rounded_arithmetic import RoundedRun, Stages
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.heads import HEADS
from lossgate.specs.outputs import Output

PHASES = (0.0, 0.5)
"""The offsets of the grids of the runs, as shares of the distance between grid numbers."""


class OnGrid(Noise):
    """Rounds to a grid as fine as the format, and makes no other errors.

    So it rounds equal numbers alike, as a kernel does. The members of an ensemble round each number
    for itself, and the errors of many tokens average out. In a kernel, the errors of tokens with
    equal log-probabilities do not, because all these errors are equal. The first run's grid has the
    numbers of the format, as in a kernel. The grid of the other run lies halfway between, as for a
    kernel that rounds half, or twice, the number.
    """

    def __init__(self, phase: float) -> None:
        """Prepares a run.

        Args:
            phase: the offset of the grid, as a share of the distance between its numbers.
        """
        super().__init__(0)
        self._phase = phase

    def uniform(self, shape: torch.Size) -> Tensor:
        """Returns zeros."""
        return torch.zeros((), dtype=torch.float64).expand(shape)

    def round(self, x: Tensor, to: FloatFormat, *, near_zero: bool = True) -> Tensor:
        """Returns the nearest numbers of the grid. Numbers that are not finite, and all numbers if
        the format is float32, stay as they are.
        """
        if to == FLOAT32:
            return x
        distance = (power_of_two(x) * (2 * to.unit)).clamp_(min=to.spacing)
        on_grid = ((x / distance + self._phase).round() - self._phase) * distance
        return torch.where(x.isfinite(), on_grid, x)


def rounds_coarsely(stages: Stages) -> bool:
    """Returns whether a kernel rounds to a coarser format than float32 before it returns."""
    ends = ("inputs", "gradients")
    inner = [stage for name, stage in vars(stages).items() if name not in ends and isinstance(stage, FloatFormat)]
    return any(stage != FLOAT32 for stage in inner)


Runs = Mapping[Output, Tensor]
"""Each output of several runs, less the reference, ``[runs, *shape]``."""


@dataclass
class KernelNoise:
    """The runs of kernels of any precision on one problem. They are kept, because runs for one
    layout often serve other layouts.
    """

    problem: Problem
    """The problem without a layout."""
    batch: GlobalBatch
    bound: BoundSpec
    _ensembles: dict[tuple[Stages, frozenset[Output], float | None], Ensemble] = field(default_factory=dict)
    _gradients: dict[tuple[str, float | None], Tensor] = field(default_factory=dict)
    _streamed: dict[tuple[str, float | None], Runs] = field(default_factory=dict)

    def deviations(
        self, partition: Partition, stages: Stages, returned: Collection[Output], reference: Mapping[Output, Tensor]
    ) -> Runs:
        """Returns the outputs of correct kernels of one precision on a layout, less the reference.

        Args:
            partition: how the layout splits the problem.
            stages: the formats to which the kernels round.
            returned: the outputs that the candidate returns.
            reference: the outputs and gradients of the reference.
        """
        return self._runs_on(partition, stages, returned, reference, None)

    def alike(
        self, partition: Partition, stages: Stages, returned: Collection[Output], reference: Mapping[Output, Tensor]
    ) -> Runs:
        """Returns the outputs of runs that round equal numbers alike, less the reference. There are
        none for kernels that round only to float32.
        """
        if not rounds_coarsely(stages):
            return {}
        runs = [self._runs_on(partition, stages, returned, reference, phase) for phase in PHASES]
        return {output: torch.cat([run[output] for run in runs]) for output in runs[0]}

    def _runs_on(
        self,
        partition: Partition,
        stages: Stages,
        returned: Collection[Output],
        reference: Mapping[Output, Tensor],
        phase: float | None,
    ) -> Runs:
        """Returns runs with random errors if ``phase`` is None, else the run on the grid of that
        phase.
        """
        if is_large(self.problem):
            return self._stream(partition, stages, returned, reference, phase)
        runs = self._at_once(partition, stages, returned, phase)
        return {output: of_runs - reference[output] for output, of_runs in runs.items() if output in reference}

    def _at_once(
        self, partition: Partition, stages: Stages, returned: Collection[Output], phase: float | None
    ) -> Mapping[Output, Tensor]:
        """Makes all runs at once.

        A gradient depends on the layout only by the split of dims that its leaf does not have. So
        it is kept for all layouts with the same split of these.
        """
        ensemble, head = self._ensemble(stages, returned, phase), HEADS[self.problem.head]
        if ensemble.dlogits is None:
            return ensemble.outputs
        gradients: dict[Output, Tensor] = {}
        for leaf, output in head.gradients(self.batch.leaves).items():
            key = repr((leaf, partition.shards_without(output.dims), sorted(map(str, returned)), stages))
            if (key, phase) not in self._gradients:
                run = self._rounded_runs(stages, f"{self.problem.to_json()} {key}", phase)
                gradient = gradient_on(partition, leaf, head, self.batch, ensemble.dlogits, run)
                self._gradients[key, phase] = gradient
            gradients[output] = self._gradients[key, phase]
        return {**ensemble.outputs, **gradients}

    def _ensemble(self, stages: Stages, returned: Collection[Output], phase: float | None) -> Ensemble:
        key = stages, frozenset(returned), phase
        if key not in self._ensembles:
            head, bound = HEADS[self.problem.head], self.bound.returning(key[1])
            run = self._rounded_runs(stages, self.problem.to_json(), phase)
            self._ensembles[key] = run_ensemble(head, self.batch, bound, run)
        return self._ensembles[key]

    def _rounded_runs(self, stages: Stages, seed: str, phase: float | None) -> RoundedRun:
        return rounded_runs(self.batch, stages, seed) if phase is None else RoundedRun(OnGrid(phase), 1, stages)

    def _stream(
        self,
        partition: Partition,
        stages: Stages,
        returned: Collection[Output],
        reference: Mapping[Output, Tensor],
        phase: float | None,
    ) -> Runs:
        """Makes one run after the other."""
        dims = partition.shards_without(()), partition.pad_to_multiple
        key = repr((dims, sorted(map(str, returned)), stages)), phase
        if key not in self._streamed:
            seed = self.problem.to_json()

            def noise_of(run: int, what: str) -> Noise:
                return OnGrid(phase) if phase is not None else Noise(crc32(f"{seed} {run} {what}".encode()))

            self._streamed[key] = run_streamed(
                HEADS[self.problem.head],
                self.batch,
                self.bound.returning(frozenset(returned)),
                partition,
                stages,
                noise_of,
                reference,
                runs_of(size_of(self.problem)) if phase is None else (1, 1),
            )
        return self._streamed[key]
