# SPDX-License-Identifier: Apache-2.0
"""The ranks that torchrun launched: rank 0 gathers and drives the processes, the others serve."""

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from threading import Thread
from typing import Any

import torch.distributed as dist

from lossgate.base.errors import UsageError
from lossgate.base.launch import Launch, launch_of_torchrun
from lossgate.base.layout import Layout, name_ranks
from lossgate.worlds.base import WorldLost
from lossgate.worlds.processes.conductor import Died
from lossgate.worlds.processes.groups import CONNECTING
from lossgate.worlds.processes.process_world import ProcessWorld, RankProcesses
from lossgate.worlds.processes.rank_messages import Finish
from lossgate.worlds.processes.server import serve
from lossgate.worlds.torchrun.meeting import connect, gather, hello, open_descriptors, open_store

_ARRIVAL = 120.0
"""Seconds in which all processes must have connected to rank 0."""
_ENDING = 10.0
"""Seconds in which rank 0's thread must end its groups."""
_HOW = "start with: torchrun --nproc-per-node N -m lossgate verify ... --world torchrun"


def torchrun_world(layout: Layout, timeout: float, device: str) -> ProcessWorld:
    """Returns a world of the first ranks that torchrun has launched."""
    ranks = launched_ranks()
    if layout.ranks > ranks:
        raise UsageError(
            f"layout {layout} has {layout.ranks} ranks, but torchrun launched {ranks}; "
            "choose a smaller layout, or a larger --nproc-per-node"
        )
    if device == "cuda":
        _gathered().check_gpus(layout)
    return ProcessWorld(layout, timeout, device, _gathered)


def launched_ranks() -> int:
    """Returns how many ranks torchrun has launched.

    Raises:
        UsageError: if torchrun did not launch this process.
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
        raise UsageError(f"world 'torchrun' needs processes that torchrun launched, but it launched none; {_HOW}")
    return launch


@cache
def _gathered() -> "LaunchedRanks":
    return LaunchedRanks(_launch())


class LaunchedRanks(RankProcesses):
    """The processes that torchrun launched. They live as long as this one. None can be replaced.

    Args:
        launch: torchrun's description of this process, which is rank 0's.
    """

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._store = open_store()
        (work, far_work), (alarm, far_alarm) = Pipe(), Pipe()
        self._own = Thread(target=self._serve, args=(launch, far_work, far_alarm), daemon=True, name="lossgate-rank0")
        arrived = gather(launch, self._store, _ARRIVAL)
        connections = {(one.hello.rank, one.hello.purpose): one.connection for one in arrived}
        self._handles = {0: LaunchedRank(0, work, alarm)}
        for rank in sorted({one.hello.rank for one in arrived}):
            if (rank, "work") in connections and (rank, "alarm") in connections:
                self._handles[rank] = LaunchedRank(rank, connections[rank, "work"], connections[rank, "alarm"])
        self._hellos = {0: hello(launch, "work")} | {one.hello.rank: one.hello for one in arrived}
        self._unfit = self._missing(launch) or self._differing()
        """Why these processes can run no task, in words; empty if they can. They must be dismissed
        in either case."""
        self._own.start()

    def check_gpus(self, layout: Layout) -> None:
        """Checks that each rank of a layout has a CUDA device.

        Raises:
            UsageError: if a rank has none.
        """
        for handle in self.ranks(layout.ranks):
            greeting = self._hellos[handle.rank]
            if greeting.gpu is None:
                raise UsageError(
                    f"device 'cuda': rank {greeting.rank} on {greeting.host} has no CUDA device of its own; choose a "
                    "smaller --nproc-per-node, or device 'cpu'"
                )

    def ranks(self, count: int) -> Sequence["LaunchedRank"]:
        if self._unfit:
            raise UsageError(self._unfit)
        for handle in self._handles.values():
            if handle.lost:
                raise WorldLost(f"rank {handle.rank} {handle.lost}, and torchrun's ranks can't be replaced")
        return [self._handles[rank] for rank in range(count)]

    def dismiss(self, code: int) -> None:
        """Ends the other processes."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it once the first process has ended
        for handle in self._handles.values():
            handle.finish(code)
        self._own.join(_ENDING)  # a group that is still there at the end of the process aborts it

    def _serve(self, launch: Launch, work: Any, alarm: Any) -> None:
        store = self._store

        def open_at(meeting: str, ranks: int) -> dist.Store:
            return dist.PrefixStore(meeting, store)

        serve(0, launch.local_rank, work, alarm, open_at, open_descriptors(), connecting=CONNECTING)

    def _missing(self, launch: Launch) -> str:
        missing = [rank for rank in range(launch.ranks) if rank not in self._handles]
        if not missing:
            return ""
        return (
            f"{name_ranks(missing)} of {launch.ranks} did not connect to rank 0 on {launch.host} within "
            f"{_ARRIVAL:g} s; look at what they printed, and check that {launch.host} accepts connections on any port"
        )

    def _differing(self) -> str:
        own = self._hellos[0]
        for _, other in sorted(self._hellos.items()):
            if difference := _difference(own.versions, other.versions):
                return (
                    f"rank {other.rank} on {other.host} has {difference} than rank 0 on {own.host}; "
                    "install the same versions on all machines"
                )
        return ""


class LaunchedRank:
    """The driver's end of a rank."""

    stopping = 10.0
    """Seconds in which it must stop. They are many, because no task can run without this rank, and
    on a busy machine it may wait a second for a core."""
    connecting = CONNECTING

    def __init__(self, rank: int, work: Any, alarm: Any) -> None:
        self.rank = rank
        self.work, self.alarm = work, alarm
        self.lost = ""
        """Why it can run no further task, in words; empty if it can."""

    def end(self) -> Died:
        self.lost = "is gone"
        return Died("its process ended, or its machine is gone", "")

    def kill(self) -> None:
        """Gives the rank up. Its process may be on another machine."""
        self.lost = "could not be stopped"

    def printed(self) -> str:
        return ""  # torchrun shows what ranks print

    def finish(self, code: int) -> None:
        # The alarm ends a process even if its task can't be stopped. For rank 0 that is the driver.
        connections = (self.work, self.alarm) if self.rank else (self.work,)
        for connection in connections:
            with suppress(OSError):
                connection.send(Finish(code))


def _difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    changed = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
    return ", ".join(f"another {name} ({other.get(name)}, not {own.get(name)})" for name in changed[:3])


def follow() -> int:
    """Serves as a rank until rank 0 is done. Returns the exit code that rank 0 gives."""
    launch = launch_of_torchrun()
    assert launch is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process, and rank 0 ends the others
    store = open_store()
    work, alarm = (connect(store, launch, purpose) for purpose in ("work", "alarm"))
    kept = open_descriptors()
    code = serve(
        launch.rank,
        launch.local_rank,
        work,
        alarm,
        lambda meeting, ranks: dist.PrefixStore(meeting, store),
        kept,
        connecting=CONNECTING,
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it once the first process has ended
    return code
