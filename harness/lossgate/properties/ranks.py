# SPDX-License-Identifier: Apache-2.0
"""Properties of how a batch is split: into microbatches, with more padding, with idle ranks."""

from dataclasses import dataclass, replace
from typing import Generic

import torch

from lossgate.cases.case import Case
from lossgate.cases.placement import ORDERS, takes_idle_ranks
from lossgate.declaration.candidate import Candidate
from lossgate.layout import Layout
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Partition
from lossgate.problems.problem import Problem, ReductionOrder
from lossgate.properties.own_counts import own_counts
from lossgate.properties.registry import Checked, OwnMistake, property
from lossgate.specs.outputs import gradient_output
from lossgate.worlds.base import RankContext, T, Task, World

_AT_ONCE = 2
"""How many microbatches each rank has."""


def _split(case: Case) -> Problem:
    """Returns the problem with a dp rank for each microbatch. One may be empty: kernels that are
    declared for several ranks must stand that, unless they exclude it.
    """
    layout = case.problem.layout
    return replace(case.problem, layout=Layout(layout.dp * _AT_ONCE, layout.cp, layout.tp))


def _mistakes(candidate: Candidate) -> list[OwnMistake]:
    nothing_held = OwnMistake(
        sentence="a microbatch without a token fails",
        matters=lambda case: _takes_idle(case.candidate),
        can_show=_leaves_one_empty,
    )
    return [nothing_held, *own_counts(_split, _AT_ONCE, candidate)]


def _leaves_one_empty(case: Case) -> bool:
    return not all(map(len, _split(case).partition.token_shards.values()))


@property(
    "microbatches",
    applies=lambda candidate: _adds_up(candidate),
    fits=lambda case: _takes_idle(case.candidate) or not _leaves_one_empty(case),
    runs=2,
    mistakes=_mistakes,
    remedy="divide by the counts that are given, which are those of the whole batch; keep nothing between calls",
)
def microbatches(case: Case) -> Checked:
    """Losses, gradients and metrics of the microbatches of a batch add up to those of the batch."""
    several = _split(case)
    in_turn = Case(case.candidate, several, _InTurn(case.world, several.layout), case.bound, also_over=("dp",))
    called = f"in {_AT_ONCE} microbatches, each as a rank of dp"
    return Checked(comparisons=tuple(replace(compared, called=called) for compared in in_turn.comparisons))


def _takes_idle(candidate: Candidate) -> bool:
    return "dp" in candidate.axes and takes_idle_ranks(candidate)


def _adds_up(candidate: Candidate) -> bool:
    """Returns whether what the dp ranks give is added up by the caller."""
    outputs = [gradient_output(name, dims) for name, dims in candidate.starts_at.leaves.items()]
    outputs += [candidate.spec.output(name) for name in (*candidate.spec.outputs, *candidate.spec.metrics)]
    split = [output for output in outputs if "token" not in output.dims and "sequence" not in output.dims]
    return all(candidate.placements(output).get("dp") in ("sum", "min", "max") for output in split)


class _InTurn:
    """A world whose ranks each do the work of several dp ranks, one after the other."""

    def __init__(self, world: World, layout: Layout) -> None:
        self._world, self.layout, self.repeatable = world, layout, world.repeatable

    def run(self, task: Task[T], *, order: ReductionOrder = "rank", seed: int = 0, patience: float = 1.0) -> list[T]:
        each = self._world.run(_Each(task, self.layout), order=order, seed=seed, patience=patience)
        by_rank = {rank: result for results in each for rank, result in results.items()}
        return [by_rank[rank] for rank in range(self.layout.ranks)]

    def close(self) -> None:
        """Does nothing: the world belongs to another."""


@dataclass(frozen=True)
class _Each(Generic[T]):
    """Does a task for each dp rank whose work a rank does."""

    task: Task[T]
    layout: Layout

    def __call__(self, context: RankContext) -> dict[int, T]:
        at, own = context.layout.coordinate(context.rank), self.layout
        results: dict[int, T] = {}
        for number in range(_AT_ONCE):
            rank = ((at["dp"] * _AT_ONCE + number) * own.cp + at["cp"]) * own.tp + at["tp"]
            results[rank] = self.task(replace(context, rank=rank))
        return results


@property(
    "other-padding",
    applies=lambda candidate: candidate.starts_at.gives == "token",
    remedy="let padding take no part, wherever the chunks of a loop begin and end",
)
def other_padding(case: Case) -> Checked:
    """Sequences that are padded to another multiple give the same."""
    padded = replace(case.problem, pad_to_multiple=case.problem.pad_to_multiple + 4)
    return Checked(comparisons=Case(case.candidate, padded, case.world, case.bound).comparisons)


@property(
    "reduction-order",
    fits=lambda case: case.world.repeatable and case.problem.layout.ranks > 1,
    remedy="add up in float32, or finer, before rounding",
    of_ranks=True,
)
def reduction_order(case: Case) -> Checked:
    """Collectives that add up in another order change no more than rounding may."""
    own = ORDERS.index(case.problem.reduction_order)
    return Checked(comparisons=case.judged(case.on_ranks(order=ORDERS[own - 1])))


@property(
    "idle-rank",
    applies=lambda candidate: "dp" in candidate.axes or "cp" in candidate.axes,
    fits=lambda case: case.problem.layout.dp * case.problem.layout.cp > 1,
    remedy="take part in every collective, with zeros, also where a rank has nothing to train",
    of_ranks=True,
)
def idle_rank(case: Case) -> Checked:
    """A rank with nothing to train does not disturb the others."""
    partition = case.placed.partition
    rank = case.problem.seed % len(partition.real_token_shards)
    name = f"idle rank {rank} of {partition.layout} {partition.padded_lengths}"
    return Checked(comparisons=case.varied(name, lambda batch: _idle(batch, partition, rank)).comparisons)


def _idle(batch: GlobalBatch, partition: Partition, rank: int) -> GlobalBatch:
    """Returns a batch in which the tokens of a rank are masked."""
    held = torch.zeros_like(batch.fields["mask"]).index_fill(0, partition.real_token_shards[rank], True)
    return replace(batch, fields={**batch.fields, "mask": batch.fields["mask"] & ~held})
