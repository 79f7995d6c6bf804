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
from lossgate.worlds.processes.process_world import ProcessWorld, RankProcesses
from lossgate.worlds.processes.server import serve


@dataclass(frozen=True)
class Start:
    """The arguments with which a process of the pool starts."""

    rank: int
    folder: str
    """The folder in which ranks meet. Each meeting has a file there."""
    output: str
    """The file that takes what the process prints."""
    driver_folder: str
    """The folder of the driver's process, which contains ``folder``. A rank that outlives the
    driver removes it."""
    environment: Mapping[str, str]
    path: tuple[str, ...]
    """The ``sys.path`` of the process."""


def run_rank(start: Start, work: Connection, alarm: Connection) -> None:
    """Serves as a rank until the driver ends this process, or ends itself."""
    start_worker(start.environment, lambda: remove_folder(start.driver_folder))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the driver, which ends its ranks
    sys.path[:] = start.path
    try:
        print_to(start.output)
        faulthandler.enable(file=STANDARD_ERROR, all_threads=False)
    except FileNotFoundError:
        os._exit(1)  # the driver has ended meanwhile, and its folder is removed
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    dist.set_debug_level_from_env()  # torch read the environment when the fork server loaded it, before the start
    rank = start.rank
    serve(rank, rank, work, alarm, lambda meeting, ranks: _file_store(start.folder, meeting, ranks), frozenset())


def _file_store(folder: str, meeting: str, ranks: int) -> dist.Store:
    return dist.FileStore(str(Path(folder, meeting)), ranks)


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"


_LAST_LINES = 20
_NOISE = ("[Gloo]", "Extension modules:")
"""The beginnings of the lines that gloo prints about its network, and Python after a crash."""


def gloo_world(layout: Layout, timeout: float, device: str) -> ProcessWorld:
    """Returns a world of processes with gloo, on the CPU."""
    if device != "cpu":
        raise UsageError(
            f"device={device!r}: ranks of world 'gloo' compute on the CPU; expected 'cpu'. "
            "For GPUs choose world 'nccl', with one GPU for each rank, or 'simulated', with one for all ranks"
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
    atexit.register(close_pool)  # registered after the clean-up of its folder, so it runs first and ends the ranks
    return pool


class RankPool(RankProcesses):
    """The processes of the pool. There are as many as the largest world so far has needed."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(dir=process_folder(), ignore_cleanup_errors=True)
        self._handles: list[PoolRank] = []

    def ranks(self, count: int) -> Sequence["PoolRank"]:
        for rank, handle in enumerate(self._handles):
            if not handle.alive:
                handle.close()
                self._handles[rank] = PoolRank(rank, self._folder.name)
                self.forget_groups()
        for rank in range(len(self._handles), count):
            self._handles.append(PoolRank(rank, self._folder.name))
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
        folder: the folder for the files of its groups and its output.
    """

    stopping = 1.0
    """Seconds in which it must stop. They are few, because another process can take its place."""
    connecting = 0.0

    def __init__(self, rank: int, folder: str) -> None:
        self.rank = rank
        self._output = Path(folder, f"output{rank}")
        self._output.touch()
        (self.work, works), (self.alarm, alarms) = Pipe(), Pipe()
        start = Start(rank, folder, str(self._output), process_folder(), dict(os.environ), tuple(sys.path))
        self._process = start_process(run_rank, start, works, alarms)
        works.close()  # if it stayed open here, the end of the process would not end the connection
        alarms.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> Died:
        """Waits until a process that is ending has ended, and returns how it ended."""
        self._process.join(5.0)
        self.kill()
        return Died(_how(self._process.exitcode), "\n".join(self.printed().splitlines()[-_LAST_LINES:]))

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def printed(self) -> str:
        """Returns what the rank has printed since the last call, without lines of ``_NOISE``."""
        if not self._output.stat().st_size:
            return ""
        lines = self._output.read_text(errors="replace").splitlines()
        os.truncate(self._output, 0)
        return "\n".join(line for line in lines if not line.startswith(_NOISE))

    def close(self) -> None:
        """Ends the process, and closes the driver's connections to it."""
        self.kill()
        self._process.close()
        self.work.close()
        self.alarm.close()


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"its process exited with code {exit_code}"
