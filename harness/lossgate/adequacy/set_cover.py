# SPDX-License-Identifier: Apache-2.0
"""Which goals a cell must reach, and which few problems of a deck cover most: a greedy set cover.

Different layouts and seeds choose differently, because variety over the whole matrix finds bugs.
"""

from collections.abc import Collection, Iterable, Sequence
from random import Random

from lossgate.adequacy.entry import Placed
from lossgate.base.layout import Layout
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY
from lossgate.specs.coverage_goals import CoverageGoal
from lossgate.specs.sharding_goals import FEW_TRAINED, NEED_UNTRAINED, SEVERAL_RANKS


def choose(placed: Sequence[Placed], wanted: Collection[str], least: int, chance: Random) -> list[Placed]:
    """Chooses problems that are likely to cover all that any of them covers.

    Args:
        placed: the problems, on one layout. One that is there several times, with several splits of
            the vocabulary, is chosen once.
        wanted: the goals to reach, and the names of the mutants to kill.
        least: how many problems are chosen at least, if there are so many.
        chance: breaks ties, and chooses those that nothing asks for.
    """
    bits = {name: 1 << i for i, name in enumerate(sorted(wanted))}
    masks = [_mask(bits, one) for one in placed]
    weights = [chance.uniform(0.5, 1.0) for _ in placed]
    chosen: list[int] = []
    left = _union(masks)
    while left:
        best = max(range(len(placed)), key=lambda i: (masks[i] & left).bit_count() * weights[i])
        if not masks[best] & left:
            break
        chosen.append(best)
        left &= ~masks[best]
        masks = [0 if one.entry is placed[best].entry else mask for one, mask in zip(placed, masks, strict=True)]
    found = [placed[i] for i in chosen]
    return found + _others(placed, found, SEVERAL_RANKS.intersection(wanted), least - len(found), chance)


def _others(
    placed: Sequence[Placed], chosen: Sequence[Placed], several: Collection[str], count: int, chance: Random
) -> list[Placed]:
    """Chooses others at random, but so that half of all have trained tokens on several ranks."""
    taken = {id(one.entry) for one in chosen}
    rest = [one for one in chance.sample(placed, len(placed)) if id(one.entry) not in taken]
    rest = list({id(one.entry): one for one in rest}.values())
    spread = [one for one in rest if one.goals.issuperset(several)]
    spread_already = sum(one.goals.issuperset(several) for one in chosen)
    needed = max(0, (len(chosen) + max(count, 0) + 1) // 2 - spread_already)
    first = spread[:needed]
    others = [one for one in rest if not any(one is taken for taken in first)]
    return [*first, *others][: max(count, 0)]


def _mask(bits: dict[str, int], placed: Placed) -> int:
    return _union(bits.get(name, 0) for name in (*placed.goals, *placed.entry.kills))


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def required_goals(candidate: Candidate, layout: Layout, dtype: str) -> dict[str, CoverageGoal]:
    """Returns the goals that a problem of this candidate on this layout can reach, by name."""
    unreachable = NEED_UNTRAINED if candidate.conventions.calls_need_training else frozenset[str]()
    if candidate.spec.trained_dim != "token":  # a group of sequences trains at least as many as ranks
        unreachable |= {FEW_TRAINED}
    return {
        name: goal
        for name, goal in candidate.spec.all_goals.items()
        if name not in unreachable and _reachable(goal, candidate, layout, dtype)
    }


def _reachable(goal: CoverageGoal, candidate: Candidate, layout: Layout, dtype: str) -> bool:
    if (goal.heads and candidate.head not in goal.heads) or (goal.dtypes and dtype not in goal.dtypes):
        return False
    if goal.axes and all(layout.sizes[axis] < goal.least_ranks for axis in goal.axes):
        return False
    for option, unreachable in goal.unreachable_if.items():
        values = candidate.supported(option)
        if values is not ANY and all(value in unreachable for value in values):
            return False
    return True
