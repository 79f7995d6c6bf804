# SPDX-License-Identifier: Apache-2.0
"""Runs that torchrun starts: pytest, the command line, and two agents as on two machines."""

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed_tests.faults import CULPRIT
from lossgate.base.errors import UsageError
from lossgate.base.launch import Launch, launch_of_torchrun
from lossgate.base.layout import Layout
from lossgate.worlds import most_ranks
from lossgate.worlds.processes.rank_messages import Finish
from lossgate.worlds.torchrun import driver
from lossgate.worlds.torchrun.meeting import Address, connect, open_descriptors
from property_tests.warm_python import warm_commands

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
BUG = "distributed_tests/wrong_kernels.py:gradient_times_cp"

pytestmark = pytest.mark.skipif(launch_of_torchrun() is not None, reason="torchrun does not start in torchrun")


def run(*command: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def run_tests(folder: Path, text: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Runs a file of tests on ranks of torchrun."""
    (folder / "test_it.py").write_text(text)
    attached = ["-m", "pytest", "-p", "no:cacheprovider", "--lossgate-world", "torchrun", str(folder)]
    return run(*TORCHRUN, "--nproc-per-node", str(ranks), *attached)


STUCK = """
import pytest, threading

@pytest.mark.xfail(reason="it hangs")
@pytest.mark.world(tp=2, timeout=1)
def test_stuck(rank_context):
    if rank_context.rank == 1:
        threading.Event().wait()
"""


@pytest.mark.slow
def test_pytest(tmp_path: Path) -> None:
    """The last test leaves a rank in C code, where nothing but the end of its process ends it."""
    (tmp_path / "test_stuck.py").write_text(STUCK)
    given = ["-p", "no:cacheprovider", "--lossgate-world", "torchrun", "distributed_tests/test_marker.py"]
    done = run(*TORCHRUN, "--nproc-per-node", "2", "-m", "pytest", *given, str(tmp_path / "test_stuck.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test session starts") == 1
    assert "5 passed, 2 skipped, 2 xfailed" in done.stdout


@pytest.mark.slow
def test_a_planted_bug_is_one_report_and_the_same_problem(tmp_path: Path) -> None:
    four = [*TORCHRUN, "--nproc-per-node", "4", "-m", "lossgate"]
    given = ["verify", BUG, "--layout", "cp=2,tp=2", "--examples", "5", "--failures"]
    launched = run(*four, *given, str(tmp_path / "launched"), "--world", "torchrun")
    simulated = run(str(warm_commands() / "lossgate"), *given, str(tmp_path / "simulated"))
    assert (launched.returncode, simulated.returncode) == (1, 1), launched.stdout + launched.stderr
    assert launched.stdout.count("grad of weight: got ") == 1
    assert launched.stderr.count("exitcode  : 1 ") == 4  # of every rank
    files = [json.loads(next((tmp_path / name).iterdir()).read_text()) for name in ("launched", "simulated")]
    assert [file.pop("world") for file in files] == ["torchrun", "simulated"]
    causes = [file.pop("causes") for file in files]  # four ranks that were launched can't try cp=3, too
    assert all(said[0].startswith("cause: the gradient of the loss is multiplied by cp") for said in causes)
    assert files[0] == files[1]
    shown = re.search(r"replay: torchrun --nproc-per-node 4 -m lossgate (replay .*)", launched.stdout)
    assert shown is not None
    replayed = run(*four, *shown[1].split())
    assert replayed.returncode == 1
    assert "it fails exactly as when the file was written" in replayed.stdout
    again = run(str(warm_commands() / "lossgate"), *shown[1].split(), "--world", "simulated")
    assert again.returncode == 1
    assert "grad of weight: got " in again.stdout


def two_tests(ranks: int, body: str) -> str:
    """Returns a file of two tests: one with this body, and one after it that needs all ranks."""
    return f"""
import time
import torch, torch.distributed as dist, pytest

@pytest.mark.world(tp={ranks})
def test_first(rank_context):
    {body}

@pytest.mark.world(tp={ranks})
def test_next(rank_context):
    dist.all_reduce(torch.ones(4))
"""


RAISES = f"""
    if rank_context.rank == {CULPRIT}:
        raise ValueError("no kernel today")
    dist.all_reduce(torch.ones(4))
"""


def test_a_rank_that_raises_fails_its_test_alone(tmp_path: Path) -> None:
    done = run_tests(tmp_path, two_tests(4, RAISES), ranks=4)
    assert done.returncode == 1
    assert done.stdout.count(f"\nrank {CULPRIT} raised ValueError: no kernel today ") == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout


LAUNCHER = f"""
import os, sys, pytest
from lossgate.worlds.processes.groups import RankGroups
from lossgate.worlds.torchrun import driver

driver.CONNECTING = 5.0
make = RankGroups._mesh

def fails_once(self, device, sizes):
    RankGroups._mesh = make
    if os.environ["RANK"] == "{CULPRIT}":
        raise RuntimeError("connection reset by peer")
    return make(self, device, sizes)

RankGroups._mesh = fails_once
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_groups_that_could_not_be_made_are_tried_again(tmp_path: Path) -> None:
    """The other ranks wait for one that does not connect. They can't be interrupted there, and
    without them nothing more can run.
    """
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "test_it.py").write_text(two_tests(4, "dist.all_reduce(torch.ones(4))"))
    given = ["-p", "no:cacheprovider", "--lossgate-world", "torchrun", str(tmp_path / "test_it.py")]
    done = run(*TORCHRUN, "--nproc-per-node", "4", str(tmp_path / "launcher.py"), *given)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


SLOW = """
    if rank_context.rank == 0:
        raise ValueError("no kernel today")
    time.sleep(3.5)
"""


@pytest.mark.slow
def test_a_rank_that_takes_a_while_to_stop_serves_the_next_test(tmp_path: Path) -> None:
    """It is asked to after a second. On a busy machine, a rank may wait as long for a core."""
    done = run_tests(tmp_path, two_tests(2, SLOW), ranks=2)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout


def two_agents(
    command: Sequence[str], paths: Sequence[Path], ranks_each: int
) -> tuple[list[int], list[str], list[str]]:
    """Runs a command on two agents, as on two machines.

    Returns exit codes, and what each wrote to stdout and stderr. Each machine has a folder of its
    own to import from.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *TORCHRUN,
                *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks_each)),
                *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                *command,
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, path in enumerate(paths)
    ]
    try:
        said = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [agent.returncode for agent in agents], [out for out, _ in said], [err for _, err in said]


@pytest.mark.slow
def test_two_agents_as_on_two_machines(tmp_path: Path) -> None:
    command = ["-m", "lossgate", "verify", "distributed_tests/wrong_kernels.py:right", "--world", "torchrun"]
    command += ["--layout", "cp=2,tp=2", "--examples", "3", "--failures", str(tmp_path)]
    codes, out, err = two_agents(command, [tmp_path, tmp_path], 2)
    assert codes == [0, 0], out[0] + err[0]
    assert "1 AGREE" in out[0]
    assert out[1] == ""


@pytest.mark.slow
def test_machines_with_other_packages_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    for node, path in enumerate(paths):
        metadata = path / f"kernels_of_ours-{node}.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: kernels-of-ours\nVersion: {node}.0\n")
    command = ["-m", "lossgate", "verify", "distributed_tests/wrong_kernels.py:right", "--world", "torchrun"]
    codes, out, err = two_agents([*command, "--layout", "cp=2"], paths, 1)
    assert codes == [1, 1]  # torchrun's own; those of the ranks are in its report
    assert (out[0].strip(), out[1]) == ("1 cell", "")
    host = socket.gethostname()
    message = f"lossgate: rank 1 on {host} has another kernels-of-ours (1.0, not 0.0) than rank 0 on {host}; install"
    assert err[0].count(message) == 1, err[0]
    assert err[0].count("exitcode  : 2 ") == 1, err[0]


@pytest.mark.slow
def test_without_the_world_torchrun_is_refused() -> None:
    done = run(*TORCHRUN, "--nproc-per-node", "2", "-m", "lossgate", "verify", BUG)
    message = "torchrun launched 2 processes, and each would do everything in world 'simulated'; add --world torchrun"
    assert done.stderr.count(message) == 1
    assert "exitcode  : 2 " in done.stderr  # of the first; torchrun may end the other


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "host"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert most_ranks("torchrun") == 6
    assert most_ranks("gloo") >= Layout(tp=8).ranks


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """Has this process take part in a torchrun of two processes; returns their store.

    It serves no tasks: a rank that serves ends its process when it has lost the driver, so it would
    end that of pytest some seconds after the test.
    """
    store = dist.HashStore()
    monkeypatch.setattr(driver, "open_store", lambda: store)
    monkeypatch.setattr(driver, "serve", lambda *given, **named: 0)
    before = signal.getsignal(signal.SIGTERM)
    yield store
    signal.signal(signal.SIGTERM, before)


def test_a_rank_that_does_not_come_is_named(rank_0: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers who connect are no ranks."""
    monkeypatch.setattr(driver, "_ARRIVAL", 2.0)

    def strangers() -> None:
        address: Address = pickle.loads(rank_0.get("lossgate/driver"))
        socket.create_connection((address.host, address.port)).close()
        said.append(socket.create_connection((address.host, address.port)))  # and says nothing
        with pytest.raises(AuthenticationError):
            Client((address.host, address.port), authkey=b"guessed")

    said = list[socket.socket]()
    thread = threading.Thread(target=strangers, daemon=True)
    thread.start()
    launched = driver.LaunchedRanks(Launch(0, 0, 2, "127.0.0.1"))
    thread.join(10)
    for _ in range(2):
        with pytest.raises(
            UsageError, match=r"^rank 1 of 2 did not connect to rank 0 on 127.0.0.1 within 2 s; look at"
        ):
            launched.ranks(1)
    launched.dismiss(2)
    said[0].close()


def test_a_rank_without_a_gpu_is_named(rank_0: dist.Store) -> None:
    def rank_1() -> None:
        for purpose in ("work", "alarm"):
            ends.append(connect(rank_0, Launch(1, 1, 2, "127.0.0.1"), purpose))

    ends = list[Connection]()
    thread = threading.Thread(target=rank_1, daemon=True)
    thread.start()
    launched = driver.LaunchedRanks(Launch(0, 0, 2, "127.0.0.1"))
    thread.join(10)
    launched._hellos[0] = replace(launched._hellos[0], gpu=0)
    launched._hellos[1] = replace(launched._hellos[1], gpu=None, host="other")
    launched.check_gpus(Layout())
    with pytest.raises(UsageError, match="device 'cuda': rank 1 on other has no CUDA device of its own"):
        launched.check_gpus(Layout(tp=2))
    launched.dismiss(3)
    assert [end.recv() for end in ends] == [Finish(3), Finish(3)]


def test_descriptors_that_are_kept_are_open() -> None:
    kept = open_descriptors()
    assert {0, 1, 2} <= kept
    with socket.socket() as made_later:
        assert made_later.fileno() not in kept
