# SPDX-License-Identifier: Apache-2.0
"""What each world reports of faults, and that it serves the next task as if nothing had been."""

import multiprocessing
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from distributed_tests.faults import COLLECTIVES, CULPRIT, ENDS, FAULTS, ends_at, healthy
from lossgate.base.layout import Layout
from lossgate.worlds import World, make_world
from lossgate.worlds.base import RankDied, RankFailure, RankRaised, Task
from lossgate.worlds.pool import close_pool

LAYOUT = Layout(tp=4)
TIMEOUT = 20.0

REPORTS: Mapping[str, tuple[str, str]] = {
    "another shape": ("CollectiveMismatch", "Deadlock"),
    "another shape of the same size": ("CollectiveMismatch", "nothing"),
    "int32 in place of float32": ("CollectiveMismatch", "nothing"),
    "bfloat16 in place of float32": ("CollectiveMismatch", "RankDied"),
    "MAX in place of SUM": ("CollectiveMismatch", "nothing"),
    "broadcast in place of all_reduce": ("CollectiveMismatch", "Deadlock"),
    "another root": ("CollectiveMismatch", "Deadlock"),
    "an extra call": ("Deadlock", "Deadlock"),
    "a missing call": ("Deadlock", "Deadlock"),
    "a return before the first call": ("Deadlock", "Deadlock"),
    "NaN under MAX": ("nothing", "nothing"),
    "sends that cross": ("Deadlock", "Deadlock"),
    "an exception": ("RankRaised", "RankRaised"),
    "an endless loop": ("Hang", "Hang"),
}
"""By fault: what the simulated world and gloo report. "nothing" is a result, which may be wrong."""


@pytest.fixture(params=["simulated", "gloo"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def world(kind: str) -> Iterator[World]:
    made = make_world(kind, LAYOUT, TIMEOUT)
    yield made
    assert made.run(healthy) == [6.0] * LAYOUT.ranks
    made.close()


@pytest.fixture
def gloo() -> World:
    close_pool()  # which may have more ranks than these tests count
    return make_world("gloo", LAYOUT, TIMEOUT)


def report(world: World, task: Any) -> tuple[str, str]:
    """Returns the kind of the failure, or "nothing", and its message."""
    try:
        return "nothing", str(world.run(task))
    except RankFailure as failure:
        return type(failure).__name__, str(failure)


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("fault", REPORTS)
def test_what_is_reported(kind: str, fault: str) -> None:
    world = make_world(kind, LAYOUT, 3.0 if fault == "an endless loop" else TIMEOUT)
    reported, message = report(world, FAULTS[fault])
    assert reported == REPORTS[fault][kind == "gloo"]
    if reported != "nothing":
        assert f"rank {CULPRIT}" in message
        assert "distributed_tests/faults.py" in message
    assert world.run(healthy) == [6.0] * LAYOUT.ranks


def test_the_page_says_what_is_reported() -> None:
    page = (Path(__file__).parents[1] / "docs/explanation/worlds.md").read_text()
    rows = re.findall(r"^\| ([^|`]+) \| (\w+) \| (\w+) \|$", page, flags=re.MULTILINE)
    assert {fault: (simulated, gloo) for fault, simulated, gloo in rows} == REPORTS


def test_gloo_drops_nan_under_max_and_the_simulated_world_does_not() -> None:
    simulated, gloo = (make_world(name, LAYOUT).run(FAULTS["NaN under MAX"]) for name in ("simulated", "gloo"))
    assert all(bool(tensor.isnan().all()) for tensor in simulated)
    assert all(0 < int(tensor.isnan().sum()) < len(tensor) for tensor in gloo)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    "fault", ["another shape of the same size", "int32 in place of float32", "broadcast in place of all_reduce"]
)
def test_torch_checks_calls_if_asked(gloo: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    kind, message = report(gloo, FAULTS[fault])
    close_pool()  # whose ranks would go on checking
    assert kind == "RankRaised"
    assert "mismatch" in message


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_whose_process_ends(gloo: World, collective: str, end: str) -> None:
    how = {"exit": "its process exited with code 3", "abort": "killed by SIGABRT"}.get(end, f"killed by {end}")
    with pytest.raises(RankDied) as failure:
        gloo.run(ends_at(collective, end))
    first, *rest = str(failure.value).splitlines()
    assert first == f"rank {CULPRIT} died: {how}"
    assert [line.split(":")[0] for line in rest[:3]] == ["  rank 0", "  rank 1", "  rank 3"]
    if end in ("SIGSEGV", "abort"):  # Python tells where it was
        assert any("faults.py" in line and line.endswith(" in task") for line in rest)
    assert gloo.run(healthy) == [6.0] * LAYOUT.ranks


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_raises(world: World, collective: str) -> None:
    def task(context: Any) -> None:
        if context.rank == CULPRIT:
            raise ValueError("no kernel today")
        COLLECTIVES[collective](torch.ones(4))

    with pytest.raises(RankRaised, match=f"^rank {CULPRIT} raised ValueError: no kernel today ") as failure:
        world.run(task)
    assert failure.value.rank == CULPRIT


def test_every_rank_says_where_it_was(gloo: World) -> None:
    _, message = report(gloo, FAULTS["an exception"])
    for rank in (0, 1, 3):
        assert f"  rank {rank}: in all_reduce  [distributed_tests/faults.py:" in message
    assert "stack of ranks 0, 1, 3:\n  File " in message
    assert f"stack of rank {CULPRIT}:\n  File " in message


SLOW = ["another shape", "another root", "an extra call", "a missing call", "a return before the first call"]
SILENT = ["another shape of the same size", "MAX in place of SUM", "int32 in place of float32", "NaN under MAX"]


def random_fault(chance: Random) -> Task[Any]:
    """Returns a fault; those that take a second to find are rare."""
    draw = chance.random()
    if draw < 0.1:
        return FAULTS[chance.choice(SLOW)]
    if draw < 0.3:
        return FAULTS[chance.choice(SILENT)]
    if draw < 0.5:
        return FAULTS["an exception"]
    return ends_at(chance.choice([*COLLECTIVES]), chance.choice([*ENDS]))


@pytest.mark.slow
def test_200_faults_in_a_row(gloo: World) -> None:
    """After each, ranks give the right sums: nothing of the fault is left in any group."""
    chance = Random(20261122)
    for number in range(200):
        report(gloo, random_fault(chance))
        layout = chance.choice([Layout(tp=4), Layout(dp=2, tp=2), Layout(cp=2), Layout(tp=3)])
        sums = make_world("gloo", layout, 20.0).run(healthy)
        assert sums == [sum(range(layout.ranks))] * layout.ranks, (number, layout)
    assert len(multiprocessing.active_children()) == LAYOUT.ranks
