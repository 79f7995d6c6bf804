# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/speed.py`` times functions by their names, which it takes as text."""

from speed import CELLS, ON_RANKS, OURS, PARTS, ROOT, Stopwatch

from lossgate.declaration.loading import load_candidates


def test_what_is_timed_is_there() -> None:
    timed = [*((owner, name) for owner, name, _ in PARTS), *ON_RANKS]
    assert [(owner, name) for owner, name in timed if name not in vars(owner)] == []
    assert {name for name, _ in CELLS} <= {one.name for one in load_candidates(str(ROOT / OURS))}


def test_what_a_part_spends_in_another_counts_for_the_other() -> None:
    class Work:
        def outer(self) -> int:
            return sum(range(100)) + self.inner()

        def inner(self) -> int:
            return sum(range(2_000_000))

    watch = Stopwatch()
    for name in ("outer", "inner"):
        watch.time(Work, name, name)
    Work().outer()
    assert watch.seconds["inner"] > 10 * watch.seconds["outer"] > 0
