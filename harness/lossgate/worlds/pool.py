# SPDX-License-Identifier: Apache-2.0
"""A pool of processes on this machine, one for each rank, with gloo or nccl.

It starts the processes, replaces those that died, and ends them all.
"""

import atexit
import faulthandler
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from lossgate.base.errors import UsageError
from lossgate.base.fork_server import start_process, start_worker
from lossgate.base.layout import Layout
from lossgate.base.own_process import STANDARD_ERROR, print_to, process_folder, remove_folder
from lossgate.worlds.processes.conductor import Died
from lossgate.worlds.processes.server import serve
from lossgate.worlds.processes.world import ProcessWorld, RankProcesses


@dataclass(frozen=True)
class Start:
    """What a process is started with."""

    rank: int
    folder: str
    """Where ranks meet, in a file for each meeting."""
    output: str
    """The file for what it prints."""
    driver_folder: str
    """The folder of the driver's process, which holds both. A rank that outlives it removes it."""
    environment: Mapping[str, str]
    path: tuple[str, ...]
    """Where it looks for modules."""


def run_rank(start: Start, work: Connection, alarm: Connection) -> None:
    """Serves as a rank until the driver ends it, or ends itself."""
    start_worker(start.environment, lambda: remove_folder(start.driver_folder))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the driver, which ends its ranks
    sys.path[:] = start.path
    try:
        print_to(start.output)
        faulthandler.enable(file=STANDARD_ERROR, all_threads=False)
    except FileNotFoundError:
        os._exit(1)  # the driver has ended meanwhile, and its folder with it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    dist.set_debug_level_from_env()  # torch read it when the fork server loaded it
    rank = start.rank
    serve(rank, rank, work, alarm, lambda meeting, ranks: _file_store(start.folder, meeting, ranks), frozenset())


def _file_store(folder: str, meeting: str, ranks: int) -> dist.Store:
    return dist.FileStore(str(Path(folder, meeting)), ranks)


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"


_LAST_LINES = 20
_NOISE = ("[Gloo]", "Extension modules:")
"""What gloo says of its network, and Python after a crash."""


def gloo_world(layout: Layout, timeout: float, device: str) -> ProcessWorld:
    """Returns a world of processes with gloo, on the CPU."""
    if device != "cpu":
        raise UsageError(
            f"device={device!r}: ranks of world 'gloo' compute on the CPU; expected 'cpu'. "
            "For GPUs choose world 'nccl', with one for each rank, or 'simulated', with one for all"
        )
    return ProcessWorld(layout, timeout, device, _pool)


def nccl_world(layout: Layout, timeout: float, device: str) -> ProcessWorld:
    """Returns a world of processes with nccl, each on its own GPU."""
    if device != "cuda":
        raise UsageError(f"device={device!r}: ranks of world 'nccl' compute on GPUs; expected 'cuda'")
    if (found := torch.cuda.device_count()) < layout.ranks:
        raise UsageError(
            f"world 'nccl' needs a CUDA device for each of the {layout.ranks} ranks of layout {layout}; torch sees "
            f"{found}. Choose a smaller layout, or world 'gloo' (on the CPU) or 'simulated' (all ranks on one device)"
        )
    return ProcessWorld(layout, timeout, device, _pool)


def close_pool() -> None:
    """Ends the processes. The next world starts new ones."""
    if _pool.cache_info().currsize:
        _pool().close()
        _pool.cache_clear()


@cache
def _pool() -> "RankPool":
    pool = RankPool()
    atexit.register(close_pool)  # after its folder's, and so it runs before: the ranks end first
    return pool


class RankPool(RankProcesses):
    """The processes, as many as the largest world so far has needed."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(dir=process_folder(), ignore_cleanup_errors=True)
        self._handles: list[PoolRank] = []

    def ranks(self, count: int) -> Sequence["PoolRank"]:
        dead = [rank for rank, handle in enumerate(self._handles) if not handle.alive]
        for rank in dead:
            self._handles[rank].close()
            self.forget_groups()
        started = {rank: PoolRank(rank, self._folder.name) for rank in (*dead, *range(len(self._handles), count))}
        self._handles = [started.get(rank) or self._handles[rank] for rank in range(max(count, len(self._handles)))]
        return self._handles[:count]

    def close(self) -> None:
        for handle in self._handles:
            handle.close()
        self._handles.clear()
        self._folder.cleanup()


class PoolRank:
    """The driver's end of a process of the pool.

    Args:
        rank: its rank.
        folder: for what its groups and its output need.
    """

    stopping = 1.0
    """Another process takes its place."""
    connecting = 0.0

    def __init__(self, rank: int, folder: str) -> None:
        self.rank = rank
        self._output = Path(folder, f"output{rank}")
        self._output.touch()
        (self.work, works), (self.alarm, alarms) = Pipe(), Pipe()
        start = Start(rank, folder, str(self._output), process_folder(), dict(os.environ), tuple(sys.path))
        self._process = start_process(run_rank, start, works, alarms)
        works.close()  # else the end of the process would not end the connection
        alarms.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> Died:
        """Waits for the end of a process that is ending, and tells how it ended."""
        self._process.join(5.0)
        self.kill()
        return Died(_how(self._process.exitcode), "\n".join(self.printed().splitlines()[-_LAST_LINES:]))

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def printed(self) -> str:
        """Returns what the rank has printed since it was last asked, without what is of no use."""
        if not self._output.stat().st_size:
            return ""
        lines = self._output.read_text(errors="replace").splitlines()
        os.truncate(self._output, 0)
        return "\n".join(line for line in lines if not line.startswith(_NOISE))

    def close(self) -> None:
        """Ends the process, and closes what the driver has of it."""
        self.kill()
        self._process.close()
        self.work.close()
        self.alarm.close()


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"its process exited with code {exit_code}"
