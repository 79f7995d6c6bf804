# SPDX-License-Identifier: Apache-2.0
"""Runs a problem in microbatches: each rank does the work of several dp ranks in turn."""

from dataclasses import dataclass, replace
from typing import Generic

from lossgate.base.layout import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.problems.problem import Problem, ReductionOrder
from lossgate.worlds.base import RankContext, T, Task, World

AT_ONCE = 2
"""How many microbatches each rank has."""


def split_in_two(problem: Problem) -> Problem:
    """Returns a problem with two dp ranks for each that it has: one for each microbatch."""
    layout = problem.layout
    return replace(problem, layout=Layout(layout.dp * AT_ONCE, layout.cp, layout.tp))


def in_microbatches(case: Case, split: Problem, bound: BoundProblem) -> Case:
    """Returns the case of a problem whose layout has a dp rank for each microbatch of a rank."""
    return Case(case.candidate, split, _InTurn(case.world, split.layout), bound, also_over=("dp",))


class _InTurn:
    """A world whose ranks each do the work of several dp ranks, one after the other."""

    def __init__(self, world: World, layout: Layout) -> None:
        self._world, self.layout, self.repeatable = world, layout, world.repeatable

    def run(self, task: Task[T], *, order: ReductionOrder = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        each = self._world.run(_Each(task, self.layout), order=order, seed=seed, patience=patience)
        by_rank = {rank: result for results in each for rank, result in results.items()}
        return [by_rank[rank] for rank in range(self.layout.ranks)]

    def close(self) -> None:
        """Does nothing. Whoever made the world closes it."""


@dataclass(frozen=True)
class _Each(Generic[T]):
    """Runs a task once for each dp rank whose work this rank does."""

    task: Task[T]
    layout: Layout

    def __call__(self, context: RankContext) -> dict[int, T]:
        at, own = context.layout.coordinate(context.rank), self.layout
        results: dict[int, T] = {}
        for number in range(AT_ONCE):
            dp = at["dp"] * AT_ONCE + number
            rank = (dp * own.cp + at["cp"]) * own.tp + at["tp"]
            results[rank] = self.task(replace(context, rank=rank))
        return results
