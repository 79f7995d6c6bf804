# SPDX-License-Identifier: Apache-2.0
"""A bound problem on a layout: what its ranks hold, and the goals that hang on that."""

from functools import cached_property

from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.materialize import lay_out
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.problem import Problem
from lossgate.specs.sharding_goals import covered_sharding_goals


class PlacedProblem:
    """A problem on its layout.

    Args:
        bound: the unsharded problem.
        problem: the same with its layout.
    """

    def __init__(self, bound: BoundProblem, problem: Problem) -> None:
        self.bound, self.problem = bound, problem
        self.partition = problem.partition

    @cached_property
    def batch(self) -> GlobalBatch:
        """The tensors as the ranks hold them, with padding."""
        return lay_out(self.bound.batch, self.problem)

    @cached_property
    def coverage(self) -> frozenset[str]:
        """The coverage goals that the problem reaches."""
        return self.bound.coverage.union(covered_sharding_goals(self.partition, self.bound.trained))
