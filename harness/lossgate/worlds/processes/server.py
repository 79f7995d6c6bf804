# SPDX-License-Identifier: Apache-2.0
"""The loop of a rank's process: loads tasks, runs them, and tells the driver how they ended.

It also tells which code it has loaded, because machines may have different versions of a file.
"""

import pickle
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from lossgate.base.errors import LossgateError
from lossgate.worlds.base import RankContext, StateLeak, Task
from lossgate.worlds.call_sites import own_fault, raise_collective, raise_site, raise_stack
from lossgate.worlds.process_state import ProcessState
from lossgate.worlds.processes.groups import OpenStore, RankGroups
from lossgate.worlds.processes.rank_messages import (
    Assignment,
    Begun,
    Finish,
    Loaded,
    Met,
    News,
    Raised,
    Reply,
    Returned,
)
from lossgate.worlds.processes.watcher import StopTask, Watcher
from lossgate.worlds.running import running

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of installed packages. The driver compares the versions of these packages."""


def loaded_code() -> dict[str, int]:
    """Returns a checksum of each loaded module that is not installed, such as a kernel's own."""
    return _checksums(len(sys.modules))


@cache
def _checksums(modules: int) -> dict[str, int]:
    """Returns the checksums. The number of loaded modules is only the key of the cache."""
    found: dict[str, int] = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name != "__main__" and file and file.endswith(".py") and not file.startswith(_INSTALLED):
            found[name] = _checksum(file)
    return found


@cache
def _checksum(file: str) -> int:
    path = Path(file)
    return crc32(path.read_bytes()) if path.is_file() else 0


_LOST = ("Connection closed", "Connection reset", "Socket closed", "Broken pipe", "remote process exited")
"""Parts of the errors that gloo and nccl raise when another rank is gone."""


def serve(
    rank: int,
    local_rank: int,
    work: Connection,
    alarm: Connection,
    open_store: OpenStore,
    kept: frozenset[int],
    *,
    connecting: float | None = None,
) -> int:
    """Runs tasks until the driver says that the rank is finished.

    Args:
        rank: the rank of this process.
        local_rank: its number among the ranks of this machine, which is also that of its GPU.
        work: the connection that brings tasks and takes the replies.
        alarm: the connection on which the driver asks and interrupts while a task runs.
        open_store: opens the store in which ranks meet to make groups.
        kept: file descriptors of connections that are no group's.
        connecting: seconds that the rank may wait for others to connect; None for an hour.

    Returns:
        The exit code of the process.
    """
    torch.set_num_threads(1)  # the ranks share the cores
    groups, watcher = RankGroups(rank, local_rank, open_store, connecting), Watcher(alarm, kept)
    while True:
        try:
            given = work.recv()
        except EOFError:
            return 1  # the driver is gone
        if isinstance(given, Finish):
            groups.discard()
            return given.code

        tell = partial(_tell, work, given.number)
        outcome = watcher.run(given.number, partial(_run, given, groups, tell, watcher.connected))
        tell(outcome)
        if not isinstance(outcome, Returned):
            watcher.leave_groups()  # the others may wait for this rank
            # A failed collective can leave gloo with a message whose buffer is gone. Its thread
            # then polls that connection without a pause until the group is destroyed.
            groups.discard()


def _tell(work: Connection, number: int, news: News) -> None:
    work.send(Reply(number, news))


def _run(
    given: Assignment, groups: RankGroups, tell: Callable[[News], None], connected: Callable[[], None]
) -> Returned | Raised:
    try:
        tell(Begun())
        context = groups.context(given)
        connected()
        tell(Met())
        task = pickle.loads(given.task)
        tell(Loaded(loaded_code()))
        return Returned(pickle.dumps(_result(task, context)), groups.calls())
    except StopTask:
        raise
    except BaseException as error:  # a kernel may raise anything, even SystemExit
        return _raised(error)


def _result(task: Task[Any], context: RankContext) -> Any:
    """Runs a task, and restores the state of the process.

    Raises:
        StateLeak: if it left anything changed.
    """
    state, changes = ProcessState.capture(), list[str]()
    try:
        with running(lambda: context.mesh):
            result = task(context)
        changes = state.changes()
    finally:
        state.restore()
    if changes:
        raise StateLeak.of(context.rank, changes)
    return result


def _raised(error: BaseException) -> Raised:
    text, fault = str(error), own_fault(error)
    if fault is not None:
        fault.add_note(traceback.format_exc())
    return Raised(
        kind=type(error).__name__,
        text=text,
        site=raise_site(error),
        collective=raise_collective(error),
        stack=raise_stack(error),
        lost_connection=isinstance(error, RuntimeError) and any(sign in text for sign in _LOST),
        error=pickle.dumps(fault or error) if fault or isinstance(error, LossgateError) else None,
    )
