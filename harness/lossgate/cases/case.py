# SPDX-License-Identifier: Apache-2.0
"""A case: one problem bound to a candidate and a world."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property

from lossgate.cases.assemble import Assembled, assemble
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.oracle import Oracle
from lossgate.cases.placed_problem import PlacedProblem
from lossgate.cases.size import is_large
from lossgate.cases.task import RankOutputs, RankTask
from lossgate.declaration.any_value import ANY
from lossgate.declaration.candidate import Candidate
from lossgate.errors import UsageError
from lossgate.judge.comparison import Comparison
from lossgate.numerics.threads import all_cores
from lossgate.problems.problem import Problem
from lossgate.worlds.base import RankFailure, World

_PATIENCE = 10.0
"""How many times as long a rank may take for a large problem before it counts as hanging."""


class Case:
    """A problem bound to a candidate and a world.

    Each part is made at most once, when asked for. What each rank returned is kept, so that a
    second look runs nothing again.

    Raises:
        UsageError: if the problem is for another spec, head, dtype or layout.
    """

    def __init__(self, candidate: Candidate, problem: Problem, world: World, bound: BoundProblem | None = None) -> None:
        """Binds a problem.

        Args:
            candidate: the kernel.
            problem: with its layout.
            world: where the ranks run.
            bound: the problem without its layout, if somebody has bound it already.
        """
        _check_fit(candidate, problem, world)
        self.candidate, self.problem, self.world = candidate, problem, world
        self.bound = bound or BoundProblem(candidate.spec, problem)
        self.placed = PlacedProblem(self.bound, problem)

    @cached_property
    def _outcome(self) -> Sequence[RankOutputs] | RankFailure:
        task = RankTask(self.candidate, self.problem.options, self.placed.batch)
        patience = _PATIENCE if is_large(self.problem) else 1.0
        try:
            return self.world.run(task, order=self.problem.reduction_order, seed=self.problem.seed, patience=patience)
        except RankFailure as failure:
            return failure

    @property
    def ranks(self) -> Sequence[RankOutputs]:
        """What the candidate returned on each rank.

        Raises:
            RankFailure: if a rank failed.
            CandidateError: if the candidate broke its declared interface.
        """
        if isinstance(self._outcome, RankFailure):
            raise self._outcome
        return self._outcome

    @cached_property
    def result(self) -> Assembled:
        """The whole outputs. Raises what ``ranks`` raises."""
        return assemble(self.ranks, self.candidate, self.placed.partition, self.problem.hidden)

    @cached_property
    def oracle(self) -> Oracle:
        """The reference and the noise that results are compared with."""
        return Oracle(self.candidate, self.placed, self.result.outputs)

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every output that was returned, and every gradient that must be given, compared with the
        reference.
        """
        result = self.result
        with all_cores() if is_large(self.problem) else nullcontext():
            return tuple(self._compare(result))

    def _compare(self, result: Assembled) -> Iterator[Comparison]:
        for output in dict.fromkeys([*result.outputs, *result.faults, *self.oracle.gradients]):
            faults = result.faults.get(output, ())
            if output in result.outputs:
                yield self.oracle.compare(output, result.outputs[output], result.dtypes[output], faults)
            else:
                yield Comparison(output=output, faults=faults)


def _check_fit(candidate: Candidate, problem: Problem, world: World) -> None:
    """Refuses a problem that the candidate was not declared for, or a world of other ranks."""
    who = f"candidate {candidate.name!r}"
    for what, own, needed in (("spec", candidate.spec.name, problem.spec), ("head", candidate.head, problem.head)):
        if own != needed:
            raise UsageError(
                f"{who} has {what} {own!r}, and the problem has {needed!r}; choose a candidate of {what} {needed!r}"
            )
    if problem.dtype not in candidate.precision:
        raise UsageError(
            f"{who} takes {', '.join(candidate.dtypes)}, and the problem is in {problem.dtype}; "
            f"choose a candidate that takes {problem.dtype}"
        )
    if extra := [axis for axis in problem.layout.axes if axis not in candidate.axes]:
        raise UsageError(
            f"{who} is not sharded over {', '.join(extra)}, and the problem's layout is {problem.layout}; "
            f"declare axes={(*candidate.axes, *extra)!r} or choose another candidate"
        )
    given = {option.name: problem.options.get(option.name, option.default) for option in candidate.spec.options}
    for option, value in {**given, "bias": problem.bias}.items():
        supported = candidate.supported(option)
        if supported is not ANY and value not in supported:
            raise UsageError(
                f"{who} does not support {option}={value!r}, and the problem has it; declare it in supports, or choose "
                "another problem"
            )
    if world.layout != problem.layout:
        raise UsageError(f"the world has layout {world.layout}, and the problem {problem.layout}; make a world of it")
