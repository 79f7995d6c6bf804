# SPDX-License-Identifier: Apache-2.0
"""How a problem is put on a layout: the split of its vocabulary, its padding, the order of sums.

Numbers do not hang on any of it. So one problem serves every layout that it fits. What its ranks
hold, and the goals that hang on that, do: a ``PlacedProblem`` has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from lossgate.base.layout import Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.drawing import Draws
from lossgate.cases.materialize import lay_out
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import VOCAB_SPLITS, Partition, VocabSplit
from lossgate.problems.problem import Problem, ReductionOrder
from lossgate.specs.option import EMPTY
from lossgate.specs.sharding_goals import covered_sharding_goals

_MULTIPLES = (1, 3)
ORDERS: tuple[ReductionOrder, ...] = ("rank", "permuted", "tree", "ring")
"""The orders in which simulated collectives add up."""


@dataclass(frozen=True)
class Placement:
    """A layout, and how problems are put on it."""

    layout: Layout
    vocab_split: VocabSplit
    pad_to_multiple: int = 1
    reduction_order: ReductionOrder = "rank"
    idle: bool = True
    """Whether dp ranks may be without a token."""

    def fits(self, problem: Problem) -> bool:
        """Returns whether each tp rank has the rows that the split promises, and dp ranks have what
        they must.
        """
        tp, vocab = self.layout.tp, problem.vocab
        rows = vocab % tp == 0 if self.vocab_split == "even" else vocab >= tp or self.vocab_split != "balanced"
        return rows and self.fills(problem)

    def fills(self, problem: Problem) -> bool:
        """Returns whether each dp rank has a token, if it must."""
        if self.idle:
            return True
        partition = self.partition(problem)
        return all(any(problem.lengths[s] for s in partition.sequences(dp)) for dp in range(self.layout.dp))

    def vocab_of(self, problem: Problem) -> int:
        """Returns the size of a problem's vocabulary, made larger if the split must be even."""
        tp = self.layout.tp
        return -(-problem.vocab // tp) * tp if self.vocab_split == "even" else problem.vocab

    def put(self, problem: Problem) -> Problem:
        """Returns an unsharded problem on the layout."""
        return replace(
            problem,
            vocab=self.vocab_of(problem),
            layout=self.layout,
            vocab_split=self.vocab_split,
            pad_to_multiple=self.pad_to_multiple,
            reduction_order=self.reduction_order,
        )

    def partition(self, problem: Problem) -> Partition:
        """Returns how an unsharded problem is split."""
        padding, group = self.pad_to_multiple, problem.group_size
        return Partition(self.layout, problem.lengths, self.vocab_of(problem), self.vocab_split, padding, group)

    def plainest(self, splits: Sequence[VocabSplit]) -> "Placement":
        """Returns the plainest placement on the same layout, with one of some splits."""
        return Placement(self.layout, "balanced" if "balanced" in splits else self.vocab_split, idle=self.idle)


def placements(
    problem: Problem, splits: Sequence[VocabSplit], layout: Layout, idle: bool = True
) -> Iterator[Placement]:
    """Yields how an unsharded problem is put on a layout, once for each split that fits.

    Padding and order differ from layout to layout. If nothing but even splits are allowed, any
    vocabulary fits: it is made larger.

    Args:
        problem: without a layout.
        splits: of the vocabulary, that are allowed.
        layout: the layout.
        idle: whether dp ranks may be without a token.
    """
    chosen = Random(f"{problem.seed} {layout}")
    padding, order = chosen.choice(_MULTIPLES), chosen.choice(ORDERS)
    for split in splits if layout.tp > 1 else splits[:1]:
        placement = Placement(layout, split, padding, order, idle)
        if placement.fits(problem) or (tuple(splits) == ("even",) and placement.fills(problem)):
            yield placement


def splits_of(candidate: Candidate) -> tuple[VocabSplit, ...]:
    """Returns the splits of the vocabulary that a candidate supports."""
    supported = candidate.supported("vocab_split")
    return tuple(split for split in VOCAB_SPLITS if supported is ANY or split in supported)


def takes_idle_ranks(candidate: Candidate) -> bool:
    """Returns whether a candidate is given dp ranks without a token."""
    return "rank" in candidate.given(EMPTY.name)


def sample_problems(candidate: Candidate, layout: Layout, dtype: str, count: int, seed: int) -> list[Problem]:
    """Returns up to ``count`` problems on a layout, the same for the same seed. Those that do not
    fit it are left out.
    """
    splits, idle, found = splits_of(candidate), takes_idle_ranks(candidate), list[Problem]()
    for problem in Draws(candidate, dtype, str(seed), count).all():
        if fitting := list(placements(problem, splits, layout, idle)):
            found.append(Random(f"{problem.seed} split").choice(fitting).put(problem))
    return found


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
