# SPDX-License-Identifier: Apache-2.0
"""Runs that torchrun starts: pytest, the command line, and two agents as on two machines."""

import json
import pickle
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed_tests.faults import CULPRIT
from lossgate.errors import UsageError
from lossgate.launch import Launch, launch_of_torchrun
from lossgate.layout import Layout
from lossgate.worlds import most_ranks
from lossgate.worlds.processes.messages import Finish
from lossgate.worlds.torchrun.meeting import Address, hello
from lossgate.worlds.torchrun.ranks import _gather

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
BUG = "distributed_tests/planted_bugs.py:gradient_times_cp"

pytestmark = pytest.mark.skipif(launch_of_torchrun() is not None, reason="torchrun does not start in torchrun")


def run(*command: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_pytest() -> None:
    done = run(
        *TORCHRUN, "--nproc-per-node", "2", "-m", "pytest", "-p", "no:cacheprovider", "distributed_tests/test_marker.py"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("test session starts") == 1
    assert "4 passed, 1 skipped" in done.stdout


def test_a_planted_bug_is_one_report_and_the_same_problem(tmp_path: Path) -> None:
    ranks = [*TORCHRUN, "--nproc-per-node", "4", "-m", "lossgate"]
    given = ["verify", BUG, "--layout", "cp=2,tp=2", "--examples", "5", "--failures"]
    launched = run(*ranks, *given, str(tmp_path / "launched"), "--world", "torchrun")
    simulated = run(sys.executable, "-m", "lossgate", *given, str(tmp_path / "simulated"))
    assert (launched.returncode, simulated.returncode) == (1, 1), launched.stdout + launched.stderr
    assert launched.stdout.count("grad of weight: 2 times the reference") == 1
    assert launched.stderr.count("exitcode  : 1 ") == 4  # of every rank
    files = [json.loads(next((tmp_path / name).iterdir()).read_text()) for name in ("launched", "simulated")]
    assert [file.pop("world") for file in files] == ["torchrun", "simulated"]
    assert files[0] == files[1]


RAISES = f"""
import torch, torch.distributed as dist, pytest

@pytest.mark.world(tp=4)
def test_sum(rank_context):
    if rank_context.rank == {CULPRIT}:
        raise ValueError("no kernel today")
    dist.all_reduce(torch.ones(4))

@pytest.mark.world(tp=4)
def test_next(rank_context):
    dist.all_reduce(torch.ones(4))
"""


def test_a_rank_that_raises_fails_its_test_alone(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(RAISES)
    attached = ["-m", "pytest", "-p", "no:cacheprovider", "--lossgate-world", "torchrun", str(tmp_path)]
    done = run(*TORCHRUN, "--nproc-per-node", "4", *attached)
    assert done.returncode == 1
    assert done.stdout.count(f"\nrank {CULPRIT} raised ValueError: no kernel today ") == 1
    assert "1 failed, 1 passed" in done.stdout


def test_two_agents_as_on_two_machines(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [
                *TORCHRUN,
                *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
                *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("-m", "lossgate", "verify", "distributed_tests/planted_bugs.py:right", "--world", "torchrun"),
                *("--layout", "cp=2,tp=2", "--examples", "3", "--failures", str(tmp_path)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    (first, errors), (second, _) = (agent.communicate(timeout=180) for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], first + errors
    assert "1 AGREE" in first
    assert second == ""


def test_without_the_world_torchrun_is_refused() -> None:
    done = run(*TORCHRUN, "--nproc-per-node", "2", "-m", "lossgate", "verify", BUG)
    message = (
        "torchrun launched 2 processes, and each would verify everything in world 'simulated'; add --world torchrun"
    )
    assert done.stderr.count(message) == 1
    assert "exitcode  : 2 " in done.stderr  # of the first; torchrun may end the other


def test_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "WORLD_SIZE": "6", "MASTER_ADDR": "host"}.items():
        monkeypatch.setenv(name, value)
    assert most_ranks("torchrun") == 6
    assert most_ranks("gloo") >= Layout(tp=8).ranks


def test_ranks_with_other_packages_are_refused() -> None:
    """Rank 1 is a thread here, and says that it has another torch."""
    store, ended = dist.HashStore(), list[Finish]()

    def rank_1() -> None:
        address: Address = pickle.loads(store.get("lossgate/driver"))
        said = hello(1, "work")
        versions = {**said.versions, "torch": "1.0"}
        ends = dict[str, Connection]()
        for purpose in ("work", "alarm"):
            ends[purpose] = Client((address.host, address.port), authkey=address.key)
            ends[purpose].send(replace(said, purpose=purpose, host="other", versions=versions))
        ended.append(ends["work"].recv())

    thread = threading.Thread(target=rank_1, daemon=True)
    thread.start()
    with pytest.raises(UsageError, match=r"rank 1 on other has another torch \(1\.0, not .*\) than rank 0 on "):
        _gather(Launch(0, 2, "127.0.0.1"), store)
    thread.join(10)
    assert ended == [Finish(2)]
