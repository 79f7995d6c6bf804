# SPDX-License-Identifier: Apache-2.0
"""Puts a problem on a layout: chooses the split of its vocabulary, its padding, and the order of
sums.

The problem's numbers do not depend on these, so one problem serves every layout that it fits. The
ranks' tensors and some coverage goals do depend on them. They belong to a ``PlacedProblem``.
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
from lossgate.specs.sharding_goals import NOTHING_ON_A_RANK, covered_sharding_goals

_MULTIPLES = (1, 3)
ORDERS: tuple[ReductionOrder, ...] = ("rank", "permuted", "tree", "ring")
"""The orders in which simulated collectives add up."""


@dataclass(frozen=True)
class Placement:
    """A layout, with the split, padding and order of sums that problems get on it."""

    layout: Layout
    vocab_split: VocabSplit
    pad_to_multiple: int = 1
    reduction_order: ReductionOrder = "rank"
    empty: tuple[str, ...] = EMPTY.choices
    """What may be empty: choices of scenario ``EMPTY``."""

    def fits(self, problem: Problem) -> bool:
        """Returns whether the vocabulary allows the split, and nothing is empty that may not be."""
        tp, vocab = self.layout.tp, problem.vocab
        if self.vocab_split == "even" and vocab % tp:
            return False
        if self.vocab_split == "balanced" and vocab < tp:
            return False
        return self.fills(problem)

    def fills(self, problem: Problem) -> bool:
        """Returns whether no rank and no shard is empty that may not be."""
        return self.empty == EMPTY.choices or {*self.partition(problem).empty} <= {*self.empty}

    def vocab_of(self, problem: Problem) -> int:
        """Returns the size of the vocabulary on the layout. An even split may make it larger."""
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
        """Returns the split of an unsharded problem over the layout."""
        padding, group = self.pad_to_multiple, problem.group_size
        return Partition(self.layout, problem.lengths, self.vocab_of(problem), self.vocab_split, padding, group)

    def plainest(self, splits: Sequence[VocabSplit]) -> "Placement":
        """Returns the plainest placement on the same layout: no padding to a multiple, and sums
        in the order of ranks. The vocabulary is split "balanced" if ``splits`` has that. Otherwise
        its split stays.
        """
        return Placement(self.layout, "balanced" if "balanced" in splits else self.vocab_split, empty=self.empty)


def placements(
    problem: Problem, splits: Sequence[VocabSplit], layout: Layout, empty: tuple[str, ...] = EMPTY.choices
) -> Iterator[Placement]:
    """Yields the placements of an unsharded problem on a layout, one for each split that fits.

    Padding and order of sums differ from layout to layout. If only even splits are allowed, any
    vocabulary fits, because it is made larger.

    Args:
        problem: the problem without a layout.
        splits: the allowed splits of the vocabulary.
        layout: the layout.
        empty: what may be empty.
    """
    chosen = Random(f"{problem.seed} {layout}")
    padding, order = chosen.choice(_MULTIPLES), chosen.choice(ORDERS)
    grows = tuple(splits) == ("even",)
    for split in splits if layout.tp > 1 else splits[:1]:
        placement = Placement(layout, split, padding, order, empty)
        fits = placement.fills(problem) if grows else placement.fits(problem)
        if fits:
            yield placement


def splits_of(candidate: Candidate) -> tuple[VocabSplit, ...]:
    """Returns the splits of the vocabulary that a candidate supports."""
    supported = candidate.supported("vocab_split")
    return tuple(split for split in VOCAB_SPLITS if supported is ANY or split in supported)


def takes_idle_ranks(candidate: Candidate) -> bool:
    """Returns whether a candidate is given dp ranks without a token."""
    return "rank" in candidate.given(EMPTY.name)


def is_given(candidate: Candidate, bound: BoundProblem, partition: Partition) -> bool:
    """Returns whether something is trained in every call of which a candidate's conventions demand
    it.
    """
    if candidate.conventions.untrained == "zero":
        return True
    if not bound.trained.sequence.size:
        return False
    if not candidate.conventions.calls_need_training:
        return True
    return NOTHING_ON_A_RANK not in covered_sharding_goals(partition, bound.trained)


def sample_problems(candidate: Candidate, layout: Layout, dtype: str, count: int, seed: int) -> list[Problem]:
    """Draws up to ``count`` problems on a layout, the same for the same seed. Problems that do not
    fit the layout are left out.
    """
    splits, empty = splits_of(candidate), candidate.given(EMPTY.name)
    found: list[Problem] = []
    for problem in Draws(candidate, dtype, str(seed), count).all():
        if fitting := list(placements(problem, splits, layout, empty)):
            found.append(Random(f"{problem.seed} split").choice(fitting).put(problem))
    return found


class PlacedProblem:
    """A problem on its layout.

    Args:
        bound: the unsharded problem.
        problem: the same problem with its layout.
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
        """The coverage goals that the problem reaches on its layout."""
        return self.bound.coverage.union(covered_sharding_goals(self.partition, self.bound.trained))
