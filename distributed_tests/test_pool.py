# SPDX-License-Identifier: Apache-2.0
"""The pool of processes: what it keeps, replaces, prints and leaves behind."""

import importlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from distributed_tests.faults import healthy
from lossgate import current_mesh
from lossgate.base.errors import UsageError
from lossgate.base.layout import Layout
from lossgate.worlds import RankContext, World, make_world
from lossgate.worlds.base import Hang, RankDied, RankRaised, StateLeak, WorldLost
from lossgate.worlds.pool import _pool, close_pool
from lossgate.worlds.processes.conductor import conduct
from lossgate.worlds.processes.groups import RankGroups
from lossgate.worlds.processes.rank_messages import (
    WHERE,
    Assignment,
    Begun,
    Loaded,
    Met,
    Raised,
    Reply,
    Stopped,
    Whereabouts,
)
from lossgate.worlds.processes.watcher import Watcher

LAYOUT = Layout(cp=2, tp=2)


@pytest.fixture
def gloo() -> World:
    return make_world("gloo", LAYOUT, 20.0)


def pid(context: RankContext) -> int:
    return os.getpid()


def mesh_id(context: RankContext) -> int:
    return id(context.mesh)


def one_raises(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError
    dist.barrier()


def test_processes_and_meshes_are_kept(gloo: World) -> None:
    pids, meshes = gloo.run(pid), gloo.run(mesh_id)
    assert len(set(pids)) == 4
    again = make_world("gloo", LAYOUT, 20.0)
    assert (again.run(pid), again.run(mesh_id)) == (pids, meshes)
    assert make_world("gloo", Layout(tp=2), 20.0).run(pid) == pids[:2]


def test_a_context_says_who_and_where(gloo: World) -> None:
    def described(context: RankContext) -> Any:
        sizes = {name: context.mesh[name].size() for name in context.mesh.mesh_dim_names or ()}
        return context.rank, context.layout, sizes, context.device

    assert gloo.run(described) == [(rank, LAYOUT, LAYOUT.sizes, torch.device("cpu")) for rank in range(4)]


def test_code_that_asks_the_process_finds_the_mesh_of_its_rank(gloo: World) -> None:
    def found(context: RankContext) -> bool:
        return current_mesh() is context.mesh

    assert gloo.run(found) == [True] * 4


def test_one_that_dies_between_tasks_is_replaced(gloo: World) -> None:
    pids = gloo.run(pid)
    os.kill(pids[1], signal.SIGKILL)
    while any(child.pid == pids[1] for child in multiprocessing.active_children()):
        time.sleep(0.01)
    assert gloo.run(healthy) == [6.0] * 4
    now = gloo.run(pid)
    assert [a == b for a, b in zip(pids, now, strict=True)] == [True, False, True, True]


def test_those_that_survive_are_kept(gloo: World) -> None:
    pids = gloo.run(pid)

    with pytest.raises(RankRaised):
        gloo.run(one_raises)
    assert gloo.run(pid) == pids


def test_one_that_gets_no_processor_for_a_while_survives_too(gloo: World) -> None:
    """A rank has a second to stop, of its own time: on a busy machine others may take that long."""
    pids = gloo.run(pid)

    def raises(context: RankContext) -> None:
        dist.barrier()  # all have told that they met; otherwise they would be asked to meet again
        if context.rank == 1:
            os.kill(pids[2], signal.SIGSTOP)
            # Not by a timer of the test: on a busy machine the rank went on before it was stopped.
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {pids[2]}"])
            raise ValueError
        dist.barrier()

    with pytest.raises(RankRaised):
        gloo.run(raises)
    assert gloo.run(pid) == pids


def test_after_a_failure_no_thread_of_gloo_goes_on(gloo: World) -> None:
    """A message whose buffer was gone kept a thread of an idle rank busy until the next task."""
    close_pool()  # libraries that other tests use keep groups in variables of their modules
    pids = gloo.run(pid)

    def threads_of_groups() -> int:
        found = 0
        for name in (name for one in pids for name in Path(f"/proc/{one}/task").glob("*/comm")):
            with suppress(OSError):  # the thread has ended meanwhile
                found += name.read_text().startswith("pt_gloo")
        return found

    assert threads_of_groups()

    with pytest.raises(RankRaised):
        gloo.run(one_raises)
    deadline = time.monotonic() + 10.0
    while threads_of_groups() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads_of_groups()
    assert gloo.run(pid) == pids


def test_what_ranks_print_is_printed(
    gloo: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    close_pool()

    def greet(context: RankContext) -> None:
        print(f"hello from {context.rank}")

    gloo.run(greet)
    assert capsys.readouterr().out == "".join(f"[rank {rank}] hello from {rank}\n" for rank in range(4))


def test_what_was_printed_before_a_crash_is_reported(gloo: World) -> None:
    def crash(context: RankContext) -> None:
        if context.rank == 1:
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankDied, match=r"rank 1 died: killed by SIGKILL\n(.*\n)+last output of rank 1:\nlast words"):
        gloo.run(crash)


class Interrupted(Exception):
    """As Ctrl-C in a notebook raises one, in the middle of whatever runs."""


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_task_gives_no_results_to_the_next(gloo: World, times: int) -> None:
    """The second time it interrupts the driver while it stops the ranks."""
    left = iter(range(times))

    def interrupt(_: int, frame: object) -> None:
        if next(left, None) is not None:
            raise Interrupted

    gloo.run(healthy)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.1)
    try:
        with pytest.raises(Interrupted):
            gloo.run(lambda context: time.sleep(0.8) or "old")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert gloo.run(lambda context: "new") == ["new"] * 4
    assert gloo.run(healthy) == [6.0] * 4


def test_a_rank_waits_until_all_have_made_their_groups() -> None:
    ranks, layout = [RankGroups(rank, 0, lambda *_: HashStore()) for rank in range(2)], Layout(dp=2)
    ranks[0]._store = ranks[1]._store = HashStore()
    first = threading.Thread(target=ranks[0]._wait_for_all, args=(layout,), daemon=True)
    first.start()
    first.join(0.2)
    assert first.is_alive()
    ranks[1]._wait_for_all(layout)
    first.join(10)
    assert not first.is_alive()


ALONE = """
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _world
from lossgate.base.layout import Layout
from lossgate.worlds.processes.groups import RankGroups
from lossgate.worlds.processes.rank_messages import Assignment

groups = RankGroups(0, 0, lambda *_: HashStore(), connecting=1.0)
try:
    groups.context(Assignment(0, Layout(dp=2), "first", "cpu", b""))
except Exception as error:
    print("raised", type(error).__name__)
groups.discard()
print("groups:", _world.group_count)
"""


def test_a_rank_waits_for_connections_for_a_limited_time_and_begins_anew() -> None:
    """The numbers of groups are in the keys by which ranks meet, so all must count from 0."""
    alone = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100)
    assert re.fullmatch(r"raised \w+\ngroups: 0\n", alone.stdout), alone.stdout + alone.stderr


class Connecting:
    """A rank that sleeps while it makes its groups, and raises once it gives up."""

    stopping, connecting = 0.0, 5.0

    def __init__(self, rank: int, *, has_met: bool) -> None:
        self.rank, self.is_killed = rank, False
        (self.work, work), (self.alarm, alarm) = multiprocessing.Pipe(), multiprocessing.Pipe()
        for news in (Begun(), Met())[: 1 + has_met]:
            work.send(Reply(0, news))
        threading.Timer(
            2.0, work.send, (Reply(0, Raised("RuntimeError", "gave up", "", None, "", False, None)),)
        ).start()
        threading.Thread(target=self._answer, args=(alarm,), daemon=True).start()

    def _answer(self, alarm: Any) -> None:
        asleep = Whereabouts(collective=None, site="", stack="", cpu_seconds=0.0, runnable=False)
        with suppress(EOFError, OSError):  # the test is over
            while True:
                if alarm.recv() == WHERE:
                    alarm.send(asleep)

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize("has_met", [False, True])
def test_a_rank_that_makes_its_groups_is_waited_for(has_met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can interrupt it there. One that has made them must stop at once, here."""
    monkeypatch.setattr("lossgate.worlds.processes.conductor._PATIENCE", dict.fromkeys((Begun, Met, Loaded), 0.2))
    rank: Any = Connecting(0, has_met=has_met)
    conduct([rank], Assignment(0, Layout(), "first", "cpu", b""), 1.0)
    assert rank.is_killed is has_met


def test_an_assignment_that_must_stop_before_it_begins_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # the test asks in its place
    watcher, began = Watcher(multiprocessing.Pipe()[1], kept=()), list[int]()
    watcher._stop(1)
    assert isinstance(watcher.run(1, lambda: began.append(1)), Stopped)
    watcher.run(2, lambda: began.append(2))
    assert began == [2]


def test_a_rank_can_still_write_to_one_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would put what it can't write into a queue, and wait for ever until it is sent."""
    before = {int(name) for name in os.listdir("/dev/fd")}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        own, _ = listening.accept()
    monkeypatch.setattr(Watcher, "_answer", lambda self: None)  # it ends the process when the driver is gone
    watcher = Watcher(multiprocessing.Pipe()[1], kept=before | {peer.fileno()})

    def fails() -> Stopped:
        watcher.connected()
        return Stopped()

    watcher.run(0, fails)
    watcher.leave_groups()
    own.close()  # as gloo does, when it reads the end
    assert peer.recv(1) == b""
    peer.send(b"here")
    time.sleep(0.05)  # a reset would have arrived
    peer.send(b"here, too")
    watcher.run(1, Stopped)
    time.sleep(0.05)
    with pytest.raises(OSError, match=r"reset|pipe"):
        peer.sendall(bytes(100_000_000))
    peer.close()


def test_ranks_that_go_on_are_in_no_deadlock() -> None:
    world = make_world("gloo", LAYOUT, 2.0)

    def endless(context: RankContext) -> None:
        while True:
            dist.all_reduce(torch.ones(2**16))

    with pytest.raises(Hang, match=r"^hang: ranks? [0-3, ]+ did not return within 2 s\n"):
        world.run(endless)


def test_a_loop_in_python_is_stopped_and_its_process_kept() -> None:
    world = make_world("gloo", LAYOUT, 1.0)
    pids = world.run(pid)

    def loop(context: RankContext) -> None:
        while context.rank == 1:
            pass

    with pytest.raises(Hang, match=r"^hang: rank 1 did not return within 1 s"):
        world.run(loop)
    assert world.run(pid) == pids


def test_a_rank_that_cannot_be_stopped_is_replaced() -> None:
    """It is in C code, where no exception of Python's can end it."""
    world = make_world("gloo", LAYOUT, 1.0)
    pids = world.run(pid)

    def sleep(context: RankContext) -> None:
        if context.rank == 1:
            threading.Event().wait()

    with pytest.raises(Hang, match=r"rank 1 did not .*\n  rank 0: has returned\n  rank 1: at \[distributed_tests"):
        world.run(sleep)
    assert [a == b for a, b in zip(pids, world.run(pid), strict=True)] == [True, False, True, True]


def test_calls_that_do_not_meet_are_not_met_by_the_next_task(gloo: World) -> None:
    """A rank may leave a call behind that nobody waits for."""

    def one_more(context: RankContext) -> None:
        if context.rank == 1:
            dist.all_reduce(torch.full((1,), 100.0), async_op=True)

    gloo.run(one_more)
    assert gloo.run(healthy) == [6.0] * 4


def held(context: RankContext | None = None) -> tuple[int, int, float]:
    """Returns how many files and threads the process has, and its memory in MB."""
    own = Path("/proc/self")
    pages = int((own / "statm").read_text().split()[1])
    return len([*(own / "fd").iterdir()]), len([*(own / "task").iterdir()]), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_nothing_leaks_over_1000_tasks(gloo: World) -> None:
    def fail(context: RankContext) -> None:
        raise ValueError

    def settle() -> list[tuple[int, int, float]]:
        for number in range(100):
            if number % 10 == 0:
                with pytest.raises(RankRaised):
                    gloo.run(fail)
            gloo.run(healthy)
        return [*gloo.run(held), held()]

    before = settle()
    for _ in range(9):
        after = settle()
    for (files, threads, memory), (files_now, threads_now, memory_now) in zip(before, after, strict=True):
        assert files_now <= files + 2
        assert threads_now <= threads
        assert memory_now < memory + 8


SCRIPT = """
from lossgate.base.layout import Layout
from lossgate.worlds import make_world

print(make_world("gloo", Layout(tp=2)).run(lambda context: context.rank))
"""


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Python's multiprocessing would run it once more in each rank."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[0, 1]\n"


def test_closed_processes_are_started_again(gloo: World) -> None:
    pids = gloo.run(pid)
    close_pool()
    assert not {child.pid for child in multiprocessing.active_children()}.intersection(pids)
    assert not set(gloo.run(pid)) & set(pids)


@pytest.mark.parametrize(
    ("world", "device", "message"),
    [
        ("gloo", "cuda", "device 'cuda': torch sees no CUDA device; choose device 'cpu', or install torch for CUDA"),
        ("nccl", "cpu", "device='cpu': ranks of world 'nccl' compute on GPUs; expected 'cuda'"),
        ("glo", "cpu", "unknown world 'glo'; did you mean 'gloo'?"),
        ("gloo", "gpu", "unknown device 'gpu'; did you mean 'cpu'? (expected one of cpu, cuda)"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where there is no GPU")
def test_what_a_machine_has_not_is_refused(world: str, device: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        make_world(world, LAYOUT, device=device)
    assert message in str(error.value)


def test_nccl_needs_a_device_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="needs a CUDA device for each of the 4 ranks of layout cp=2,tp=2; torch "):
        make_world("nccl", LAYOUT, device="cuda")


def test_what_a_task_leaves_changed_is_reported_and_restored(gloo: World) -> None:
    def leak(context: RankContext) -> None:
        if context.rank == 2:
            torch.set_default_dtype(torch.float64)

    with pytest.raises(StateLeak, match=r"^rank 2 left torch.get_default_dtype\(\) at torch.float64"):
        gloo.run(leak)
    assert gloo.run(lambda context: torch.get_default_dtype()) == [torch.float32] * 4


@pytest.mark.slow
def test_groups_that_could_not_be_made_are_tried_again(gloo: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.worlds.processes.conductor._PATIENCE", {Begun: 20.0, Met: 3.0, Loaded: 20.0})
    gloo.run(healthy)
    pool = _pool()
    pool.forget_groups()
    meeting = next(pool._numbers) + 1
    Path(pool._folder.name, f"meeting{meeting}").write_bytes(b"\xff" * 100)  # which is no store
    assert gloo.run(healthy) == [6.0] * 4
    assert next(pool._numbers) > meeting + 1


@pytest.mark.slow
def test_groups_that_cannot_be_made_are_no_failure_of_the_kernel(gloo: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossgate.worlds.processes.conductor._PATIENCE", {Begun: 20.0, Met: 3.0, Loaded: 20.0})
    monkeypatch.setattr("lossgate.worlds.processes.process_world._MEETINGS", 1)
    gloo.run(healthy)
    pool = _pool()
    pool.forget_groups()
    Path(pool._folder.name, f"meeting{next(pool._numbers) + 1}").write_bytes(b"\xff" * 100)
    with pytest.raises(WorldLost, match=r"^the ranks could not make their groups in 1 tries; the last failure: "):
        gloo.run(healthy)
    monkeypatch.undo()
    assert gloo.run(healthy) == [6.0] * 4


def test_ranks_with_other_code_are_refused(gloo: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gets a folder of its own to import from, as if it were another machine."""
    for rank in range(LAYOUT.ranks):
        folder = tmp_path / str(rank)
        folder.mkdir()
        constant = 1.0 if rank == 2 else 2.0
        (folder / "module_of_each_machine.py").write_text(f"def scale(context): return {constant}\n")
    monkeypatch.syspath_prepend(tmp_path / "0")
    module = importlib.import_module("module_of_each_machine")

    def moves(context: RankContext) -> None:
        sys.path.insert(0, str(tmp_path / str(context.rank)))

    try:
        gloo.run(moves)
        with pytest.raises(UsageError, match="module module_of_each_machine on rank 2 differs from that on rank 0"):
            gloo.run(module.scale)
    finally:
        close_pool()
        del sys.modules["module_of_each_machine"]
