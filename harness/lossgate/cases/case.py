# SPDX-License-Identifier: Apache-2.0
"""A case: one problem bound to a candidate and a world."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from lossgate.cases.assemble import Assembled, assemble
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.oracle import Oracle
from lossgate.cases.task import RankOutputs, RankTask
from lossgate.declaration.candidate import Candidate
from lossgate.errors import UsageError
from lossgate.judge.comparison import Comparison
from lossgate.problems.problem import Problem
from lossgate.worlds.base import World


class Case:
    """A problem bound to a candidate and a world.

    Each part is made at most once, when asked for. What each rank returned is kept, so that a
    second look runs nothing again.

    Raises:
        UsageError: if the problem is for another spec or head.
    """

    def __init__(self, candidate: Candidate, problem: Problem, world: World) -> None:
        for what, own, needed in (("spec", candidate.spec.name, problem.spec), ("head", candidate.head, problem.head)):
            if own != needed:
                raise UsageError(
                    f"candidate {candidate.name!r} has {what} {own!r}, and the problem has {needed!r}; "
                    f"choose a candidate of {what} {needed!r}"
                )
        self.candidate, self.problem, self.world = candidate, problem, world
        self.bound = BoundProblem(candidate.spec, problem)

    @cached_property
    def ranks(self) -> Sequence[RankOutputs]:
        """What the candidate returned on each rank.

        Raises:
            RankFailure: if a rank failed.
            CandidateError: if the candidate broke its declared interface.
        """
        self.bound.batch  # noqa: B018  made here, once, and not by each rank
        task = RankTask(self.candidate, self.bound)
        return self.world.run(task, order=self.problem.reduction_order, seed=self.problem.seed)

    @cached_property
    def result(self) -> Assembled:
        """The whole outputs. Raises what ``ranks`` raises."""
        return assemble(self.ranks, self.candidate, self.bound.batch.partition, self.problem.hidden)

    @cached_property
    def oracle(self) -> Oracle:
        """The reference and the noise that results are compared with."""
        return Oracle(self.candidate, self.bound, self.result.outputs)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every output that was returned, and every gradient that must be given, compared with the
        reference.
        """
        return tuple(self._compare())

    def _compare(self) -> Iterator[Comparison]:
        result = self.result
        for output in dict.fromkeys([*result.outputs, *result.faults, *self.oracle.gradients]):
            faults = result.faults.get(output, ())
            if output in result.outputs:
                yield self.oracle.compare(output, result.outputs[output], result.dtypes[output], faults)
            else:
                yield Comparison(output=output, faults=faults)
