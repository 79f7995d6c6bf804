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
from lossgate.worlds.processes.messages import Finish
from lossgate.worlds.processes.server import serve
from lossgate.worlds.processes.world import ProcessWorld, RankProcesses
from lossgate.worlds.torchrun.meeting import connect, gather, hello, open_descriptors, open_store

_ARRIVAL = 120.0
"""Seconds in which all processes must have connected to rank 0."""
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
    if device == "cuda":
        _gathered().check_gpus(layout)
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

    Args:
        launch: what torchrun says of this process, which is that of rank 0.
    """

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._store = open_store()
        (work, far_work), (alarm, far_alarm) = Pipe(), Pipe()
        self._own = Thread(target=self._serve, args=(launch, far_work, far_alarm), daemon=True, name="lossgate-rank0")
        arrived = gather(launch, self._store, _ARRIVAL)
        ends = {(one.hello.rank, one.hello.purpose): one.connection for one in arrived}
        self._handles = {0: LaunchedRank(0, work, alarm)}
        for rank in sorted({one.hello.rank for one in arrived}):
            if (rank, "work") in ends and (rank, "alarm") in ends:
                self._handles[rank] = LaunchedRank(rank, ends[rank, "work"], ends[rank, "alarm"])
        self._hellos = {0: hello(launch, "work")} | {one.hello.rank: one.hello for one in arrived}
        self._unfit = self._missing(launch) or self._differing()
        """Why these processes can run nothing, in words. They still want to be dismissed."""
        self._own.start()

    def check_gpus(self, layout: Layout) -> None:
        """Checks that each rank of a layout has a CUDA device.

        Raises:
            UsageError: if one has none.
        """
        for handle in self.ranks(layout.ranks):
            said = self._hellos[handle.rank]
            if said.gpu is None:
                raise UsageError(
                    f"device 'cuda': rank {said.rank} on {said.host} has no CUDA device of its own; choose a smaller "
                    "--nproc-per-node, or device 'cpu'"
                )

    def ranks(self, count: int) -> Sequence["LaunchedRank"]:
        if self._unfit:
            raise UsageError(self._unfit)
        for handle in self._handles.values():
            if handle.lost:
                raise WorldLost(f"rank {handle.rank} {handle.lost}, and torchrun's ranks can't be replaced")
        return [self._handles[rank] for rank in range(count)]

    def dismiss(self, code: int) -> None:
        """Ends the other processes. From then on this one ignores that torchrun wants it to end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
            f"{_ARRIVAL:g} s; see what they printed, and whether that machine accepts connections on any port"
        )

    def _differing(self) -> str:
        own, *others = (said for _, said in sorted(self._hellos.items()))
        for other in others:
            if difference := _difference(own.versions, other.versions):
                where = f"rank {other.rank} on {other.host}", f"rank 0 on {own.host}"
                return f"{where[0]} has {difference} than {where[1]}; install the same on all machines"
        return ""


class LaunchedRank:
    """The driver's end of a rank."""

    stopping = 10.0
    """Without this rank nothing more can run. On a busy machine it may wait a second for a core."""
    connecting = CONNECTING

    def __init__(self, rank: int, work: Any, alarm: Any) -> None:
        self.rank = rank
        self.work, self.alarm = work, alarm
        self.lost = ""
        """Why it can run nothing more, in words."""

    def end(self) -> Died:
        self.lost = "is gone"
        return Died("its process ended, or its machine is gone", "")

    def kill(self) -> None:
        """Gives the rank up. Its process may be on another machine."""
        self.lost = "could not be stopped"

    def printed(self) -> str:
        return ""  # torchrun shows what ranks print

    def finish(self, code: int) -> None:
        # The alarm is for a task that can't be stopped. Rank 0 is the driver's own process.
        for connection in (self.work, self.alarm) if self.rank else (self.work,):
            with suppress(OSError):
                connection.send(Finish(code))


def _difference(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    changed = [name for name in sorted({*own, *other}) if own.get(name) != other.get(name)]
    return ", ".join(f"another {name} ({other.get(name)}, not {own.get(name)})" for name in changed[:3])


def follow() -> int:
    """Serves as a rank until rank 0 is done. Returns the exit code that rank 0 gives."""
    launch = launch_of_torchrun()
    assert launch is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to every process; rank 0 tells the others
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
