# SPDX-License-Identifier: Apache-2.0
"""``benchmarks/speed.py`` times functions by their names, which it takes as text."""

import pytest
from speed import CELLS, ON_RANKS, OURS, PARTS, ROOT, Stopwatch

from lossgate.declaration.loading import load_candidates


def test_what_is_timed_is_there() -> None:
    timed = [*((owner, name) for owner, name, _ in PARTS), *ON_RANKS]
    assert [(owner, name) for owner, name in timed if name not in vars(owner)] == []
    assert {name for name, _ in CELLS} <= {one.name for one in load_candidates(str(ROOT / OURS))}


def test_what_a_part_spends_in_another_counts_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("speed.process_time", lambda: now)

    class Work:
        def outer(self) -> None:
            self.inner()
            self.takes(2.0)

        def inner(self) -> None:
            self.takes(5.0)

        def takes(self, seconds: float) -> None:
            nonlocal now
            now += seconds

    watch = Stopwatch()
    for name in ("outer", "inner"):
        watch.time(Work, name, name)
    Work().outer()
    assert watch.seconds == {"inner": 5.0, "outer": 2.0}
