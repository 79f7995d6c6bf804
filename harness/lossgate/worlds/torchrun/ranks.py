# SPDX-License-Identifier: Apache-2.0
"""Rank 0's side: it gathers the processes that torchrun launched, and drives them."""

import secrets
import signal
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Listener
from threading import Thread
from typing import Any

import torch.distributed as dist

from lossgate.errors import UsageError
from lossgate.launch import Launch, launch_of_torchrun
from lossgate.layout import Layout
from lossgate.worlds.base import WorldLost
from lossgate.worlds.processes.conductor import Died
from lossgate.worlds.processes.messages import Finish
from lossgate.worlds.processes.server import serve
from lossgate.worlds.processes.world import ProcessWorld, RankProcesses
from lossgate.worlds.torchrun.meeting import (
    Address,
    Hello,
    hello,
    open_descriptors,
    open_store,
    publish,
    send_at_once,
)

_ENDING = 10.0
"""Seconds in which rank 0's thread ends its groups."""
_HOW = "start with: torchrun --nproc-per-node N -m lossgate verify ... --world torchrun"


def torchrun_world(layout: Layout, timeout: float, device: str) -> ProcessWorld:
    """Returns a world of the first ranks that torchrun has launched."""
    ranks = launched_ranks()
    if layout.ranks > ranks:
        raise UsageError(
            f"layout {layout} has {layout.ranks} ranks, and torchrun launched {ranks}; "
            "choose a smaller layout, or a larger --nproc-per-node"
        )
    return ProcessWorld(layout, timeout, device, _gathered)


def launched_ranks() -> int:
    """Returns how many ranks torchrun has launched.

    Raises:
        UsageError: if it did not launch this process.
    """
    return _launch().ranks


def dismiss(code: int) -> None:
    """Ends the other ranks with an exit code. Rank 0 calls this before it ends."""
    launch = launch_of_torchrun()
    if launch is not None and launch.rank == 0:
        _gathered().dismiss(code)


def _launch() -> Launch:
    launch = launch_of_torchrun()
    if launch is None:
        raise UsageError(f"world 'torchrun' is made of processes that torchrun launched, and it launched none; {_HOW}")
    return launch


@cache
def _gathered() -> "LaunchedRanks":
    return LaunchedRanks(_launch())


class LaunchedRanks(RankProcesses):
    """The processes, all of them for as long as this one lives. None can be replaced.

    Raises:
        UsageError: if one has other versions of packages than this one.
    """

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._store = open_store()
        self._handles: Mapping[int, LaunchedRank] = _gather(launch, self._store)
        own = self._handles[0]
        self._own = Thread(target=self._serve, args=(own.far_work, own.far_alarm), daemon=True, name="lossgate-rank0")
        self._own.start()

    def ranks(self, count: int) -> Sequence["LaunchedRank"]:
        for handle in self._handles.values():
            if handle.lost:
                raise WorldLost(f"rank {handle.rank} is gone, and torchrun's ranks can't be replaced")
        return [self._handles[rank] for rank in range(count)]

    def dismiss(self, code: int) -> None:
        """Ends the other processes. From then on this one ignores that torchrun wants it to end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for handle in self._handles.values():
            handle.finish(code)
        self._own.join(_ENDING)  # a group that is still there at the end of the process aborts it

    def _serve(self, work: Any, alarm: Any) -> None:
        store = self._store
        serve(0, work, alarm, lambda meeting, ranks: dist.PrefixStore(meeting, store), open_descriptors())


class LaunchedRank:
    """The driver's end of a rank."""

    def __init__(self, rank: int, work: Any, alarm: Any, far: tuple[Any, Any] = (None, None)) -> None:
        self.rank = rank
        self.work, self.alarm = work, alarm
        self.far_work, self.far_alarm = far
        """The other ends, of the rank that is a thread of this process."""
        self.lost = False

    def end(self) -> Died:
        self.lost = True
        return Died("its process ended, or its machine is gone", "")

    def kill(self) -> None:
        """Gives the rank up. Its process may be on another machine."""
        self.lost = True

    def printed(self) -> str:
        return ""  # torchrun shows what ranks print

    def finish(self, code: int) -> None:
        try:
            self.work.send(Finish(code))
        except OSError:
            self.lost = True


def _gather(launch: Launch, store: dist.Store) -> dict[int, LaunchedRank]:
    """Waits for all other processes, and compares what they have installed."""
    key, connections, said = secrets.token_bytes(32), dict[tuple[int, str], Any](), dict[int, Hello]()
    with Listener(("", 0), backlog=2 * launch.ranks, authkey=key) as listener:
        publish(Address(launch.host, int(listener.address[1]), key), store)
        while len(connections) < 2 * (launch.ranks - 1):
            connection = listener.accept()
            send_at_once(connection)
            first: Hello = connection.recv()
            connections[first.rank, first.purpose], said[first.rank] = connection, first
    (work, far_work), (alarm, far_alarm) = Pipe(), Pipe()
    handles = {0: LaunchedRank(0, work, alarm, (far_work, far_alarm))}
    for rank in range(1, launch.ranks):
        handles[rank] = LaunchedRank(rank, connections[rank, "work"], connections[rank, "alarm"])
    own = hello(0, "work")
    for rank, other in sorted(said.items()):
        if difference := _difference(own.versions, other.versions):
            for handle in handles.values():
                handle.finish(2)
            where = f"rank {rank} on {other.host}", f"rank 0 on {own.host}"
            raise UsageError(f"{where[0]} has {difference} than {where[1]}; install the same on all machines")
    return handles


def _difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    changed = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
    return ", ".join(f"another {name} ({other.get(name)}, not {own.get(name)})" for name in changed[:3])
