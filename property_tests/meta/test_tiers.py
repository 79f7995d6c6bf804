# SPDX-License-Identifier: Apache-2.0
"""A slow test runs in one of twenty slices, and with ``ci/test --all``; the others run always."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import conftest
from property_tests import cpu_seconds

ROOT = Path(__file__).parents[2]


class Item:
    """An item of pytest, as far as tiers look at it."""

    def __init__(self, nodeid: str, but: int | None = None) -> None:
        self.nodeid, self.but = nodeid, but

    def get_closest_marker(self, name: str) -> Any:
        own = pytest.mark.slow if not self.but else pytest.mark.slow(but=self.but)
        return None if self.but is None or name != "slow" else own.mark


ITEMS = [
    *(Item(f"a.py::quick[{case}]") for case in range(50)),
    *(Item(f"a.py::slow[{case}]@deck", but=0) for case in range(400)),
    *(Item(f"b.py::some[{case}]", but=3) for case in range(100)),
]


def run(share: str) -> set[str]:
    left_out = conftest._left_out(ITEMS, *conftest._share(share))
    return {item.nodeid for item in ITEMS} - {item.nodeid for item in left_out}


def test_quick_tests_and_the_first_cases_of_slow_ones_always_run() -> None:
    assert run("none") == {*(item.nodeid for item in ITEMS[:50]), *(item.nodeid for item in ITEMS[450:453])}
    assert run("all") == {item.nodeid for item in ITEMS}


def test_each_slow_test_is_in_one_of_twenty_slices() -> None:
    slices = [run(f"{number}/20") for number in range(20)]
    assert set().union(*slices) == run("all")
    assert sum(len(one - run("none")) for one in slices) == len(run("all") - run("none"))
    assert all(len(one) > len(run("none")) + 10 for one in slices), "they are of like size"


def test_a_test_stays_in_its_slice_whatever_its_worker_calls_it() -> None:
    """xdist adds the name of a group."""
    number = next(n for n in range(20) if "a.py::slow[7]@deck" in run(f"{n}/20"))
    assert not conftest._left_out([Item("a.py::slow[7]", but=0)], number, 20)


@pytest.mark.parametrize("share", ["20/20", "-1/20", "some", "1", "1/", "/20", ""])
def test_another_share_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"--slow=.*: expected one of none, all, 0/20 to 19/20"):
        conftest._share(share)


def test_ci_runs_the_first_tier_and_a_slice_that_the_commit_chooses() -> None:
    assert 'ci/test --slow "$(($(git rev-list --count HEAD) % 20))/20"' in (ROOT / ".ci/run").read_text()


def test_the_cpu_seconds_of_a_process_have_those_of_its_children() -> None:
    before = cpu_seconds.seconds_of_tree(os.getpid())
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alive = cpu_seconds.seconds_of_tree(os.getpid())
        child.communicate(b"\n")
    assert alive - before >= 0.4
    assert cpu_seconds.seconds_of_tree(os.getpid()) - before >= 0.4
