# SPDX-License-Identifier: Apache-2.0
"""A problem bound to its spec: its tensors and references, each made once, when asked for."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from lossgate.cases.kinks import mask_near_kinks
from lossgate.cases.materialize import materialize, with_cotangents
from lossgate.cases.reference import run_reference
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.specs.outputs import Output
from lossgate.specs.spec import Spec


class BoundProblem:
    """A problem of a spec. Nothing in it depends on a candidate or on who runs it.

    Raises:
        UsageError: if the spec does not allow the problem's options.
    """

    def __init__(self, spec: Spec, problem: Problem) -> None:
        self.spec, self.problem = spec, problem
        self.bound_spec = spec.bind(problem.options)

    @cached_property
    def unmasked(self) -> GlobalBatch:
        """The batch before tokens near a kink are masked. It takes far less time to make."""
        return materialize(self.problem, self.bound_spec)

    @cached_property
    def batch(self) -> GlobalBatch:
        """The batch on which a candidate is run and judged."""
        masked = mask_near_kinks(self.unmasked, self.problem, self.bound_spec)
        if masked is self.unmasked:  # its upstream gradients fit already
            return masked
        return with_cotangents(masked, self.problem, self.bound_spec)

    @cached_property
    def unmasked_reference(self) -> Mapping[Output, Tensor]:
        """The reference loss and gradients of the batch before tokens near a kink are masked."""
        return self.reference_with(self.bound_spec.values, self.unmasked)

    @cached_property
    def coverage(self) -> frozenset[str]:
        """The coverage goals that the problem reaches."""
        return self._covered(self.batch)

    @cached_property
    def likely_coverage(self) -> frozenset[str]:
        """The goals that the problem reaches if no token near a kink has to be masked."""
        return self._covered(self.unmasked)

    def _covered(self, batch: GlobalBatch) -> frozenset[str]:
        covered = self.spec.covered(batch, self.bound_spec.options)
        if self.spec.trains(batch.fields):
            chosen = self.problem.scenario
            covered |= {f"{c.name}: {chosen.get(c.name, c.default)}" for c in self.spec.scenarios}
        return frozenset(covered)

    def reference(self, returned: Collection[Output]) -> Mapping[Output, Tensor]:
        """Computes the reference for a candidate that returns some outputs."""
        return run_reference(self.batch, self.problem.head, self.bound_spec.returning(returned))

    def reference_with(self, options: Mapping[str, Any], batch: GlobalBatch) -> dict[Output, Tensor]:
        """Computes the loss and gradients that other options would give on a batch."""
        return run_reference(batch, self.problem.head, self.spec.bind(options).returning(()))
