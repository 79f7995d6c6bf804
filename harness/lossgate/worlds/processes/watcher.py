# SPDX-License-Identifier: Apache-2.0
"""The thread of a rank that says where its task is, and stops it."""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from lossgate.worlds.call_sites import collective_of, site_of, stack_of
from lossgate.worlds.processes.rank_messages import WHERE, Finish, Stop, Stopped, Whereabouts

T = TypeVar("T")
_ON_ITS_WAY = 1.0
"""Seconds in which an exception that was sent to a thread must have been raised there."""

_ENDING = 5.0
"""Seconds that the process has to end by itself before it is ended."""


class StopTask(BaseException):
    """Ends a task. It is no ``Exception``, so that a kernel does not catch it by accident."""


class Watcher:
    """Answers the driver while the thread that made it runs tasks.

    Args:
        alarm: the connection on which the driver asks.
        kept: file descriptors of connections that are never shut down.
    """

    def __init__(self, alarm: Connection, kept: Collection[int]) -> None:
        self._alarm, self._kept = alarm, kept
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._running: int | None = None
        """The number of the assignment that can be stopped."""
        self._sent = False
        """A ``StopTask`` is on its way to the assignment that runs."""
        self._refused = -1
        """The number of an assignment that must stop and has not begun."""
        self._connected = False
        self._held: list[socket.socket] = []
        """Connections that stay open until the next task; see ``_shut``."""
        threading.Thread(target=self._answer, daemon=True, name="lossgate-watcher").start()

    def run(self, number: int, body: Callable[[], T]) -> T | Stopped:
        """Runs an assignment, which can be stopped by its number. The body must catch everything
        that the task raises except ``StopTask``.
        """
        result: T | Stopped = Stopped()
        with self._lock:
            if number == self._refused:
                return result
            self._running, self._sent, self._connected = number, False, False
            self._release()
        try:
            result = body()
            with self._lock:
                self._running = None
            deadline = time.monotonic() + _ON_ITS_WAY
            while self._sent and time.monotonic() < deadline:
                time.sleep(0.001)
        except StopTask:
            self._running = None
        return result

    def connected(self) -> None:
        """Says that the task has its groups, so that all their connections are made."""
        self._connected = True

    def leave_groups(self) -> None:
        """Tells the other ranks of all groups that nothing more comes from this one, whose task has
        failed. Those that wait in a collective with it then raise within milliseconds.

        Torch offers no way to do that: ``abort`` leaves gloo's ranks blocked, and a destroyed group
        keeps its sockets as long as a mesh or a frame refers to it.
        """
        with self._lock:
            self._shut(socket.SHUT_WR)

    def _shut(self, how: int) -> None:
        """Shuts down each network connection of this process that is not to be kept.

        Connections stay open in one direction, also when gloo closes them, until the next task
        begins. Otherwise a rank could write to a closed one. Gloo then puts what it has to send
        into a queue, and forgets it there when it learns that the connection is lost, so that the
        rank waits for ever (pytorch/gloo, transport/tcp/pair.cc: ``signalException``).
        """
        held = {connection.fileno() for connection in self._held}
        for fd in {int(name) for name in os.listdir("/dev/fd")}.difference(self._kept, held):
            with suppress(OSError):  # no socket, or closed meanwhile
                if (connection := _connection(fd)) is not None:
                    self._held.append(connection)
        for connection in self._held:
            with suppress(OSError):
                connection.shutdown(how if self._connected else socket.SHUT_RDWR)
        if not self._connected:
            self._release()  # gloo closes those that it is making without a word to its loop

    def _release(self) -> None:
        while self._held:
            self._held.pop().close()

    def _answer(self) -> None:
        while True:
            try:
                asked = self._alarm.recv()
                if asked == WHERE:
                    self._alarm.send(self._whereabouts())
            except (EOFError, OSError):
                asked = Finish(1)  # the driver is gone
            if isinstance(asked, Stop):
                self._stop(asked.number)
            elif isinstance(asked, Finish):
                time.sleep(_ENDING)  # the process ends by itself, unless a task can't be stopped
                os._exit(asked.code)

    def _whereabouts(self) -> Whereabouts:
        thread = self._thread
        return Whereabouts(
            collective=collective_of(thread),
            site=site_of(thread),
            stack=stack_of(thread),
            cpu_seconds=time.process_time(),
            runnable=_others_run(),
        )

    def _stop(self, number: int) -> None:
        with self._lock:
            if self._running is None:
                self._refused = number  # it may have ended, or begin later
            if self._running != number:
                return
            self._sent = True
            self._shut(socket.SHUT_RD)  # what it waits for ends; what it writes meanwhile still arrives
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(StopTask))


def _connection(fd: int) -> socket.socket | None:
    """Returns another handle of a network connection; None for others. A listening socket is none:
    without it gloo would abort the process.
    """
    copy = os.dup(fd)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    connects = not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if found.family in (socket.AF_INET, socket.AF_INET6) and connects:
        return found
    found.close()
    return None


def _others_run() -> bool:
    """Returns whether another thread of this process runs or waits for a processor (on Linux)."""
    own = threading.get_native_id()
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended meanwhile
            if int(thread.name) != own and (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
