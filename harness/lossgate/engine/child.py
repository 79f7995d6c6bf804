# SPDX-License-Identifier: Apache-2.0
"""A process in which candidates run and which may die.

Before each case the process writes down the problem. So the parent can tell which problem ended it.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from lossgate.base.fork_server import start_process, start_worker
from lossgate.base.own_process import new_folder, print_by_line, print_to, process_folder, remove_folder, take_folder
from lossgate.cases import current_case
from lossgate.cases.current_case import Phase, Ran
from lossgate.worlds.process_state import ProcessState

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)

_STREAMS = (0, 1, 2)


@dataclass(frozen=True, eq=False)
class LeftBehind:
    """State of a process, captured before a job."""

    process: ProcessState
    folder: str
    handlers: tuple[Any, ...]
    recursion_limit: int
    streams: tuple[Any, ...]
    """``sys.stdin``, ``sys.stdout`` and ``sys.stderr``."""
    descriptors: tuple[int, ...]
    """Copies of the file descriptors 0, 1 and 2, which a kernel may close or redirect."""

    @classmethod
    def capture(cls) -> "LeftBehind":
        """Captures the state of this process. Call it in the main thread."""
        return cls(
            process=ProcessState.capture(),
            folder=os.getcwd(),
            handlers=tuple(signal.getsignal(each) for each in _HANDLED),
            recursion_limit=sys.getrecursionlimit(),
            streams=(sys.stdin, sys.stdout, sys.stderr),
            descriptors=tuple(os.dup(number) for number in _STREAMS),
        )

    def restore(self) -> None:
        """Restores the state. Call it once."""
        self.process.restore()
        os.chdir(self.folder)
        sys.setrecursionlimit(self.recursion_limit)
        sys.stdin, sys.stdout, sys.stderr = self.streams
        for number, copy in zip(_STREAMS, self.descriptors, strict=True):
            with suppress(OSError):  # the kernel closed the copy, too
                os.dup2(copy, number)
                os.close(copy)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in zip(_HANDLED, self.handlers, strict=True):
            if handler is not None:
                signal.signal(each, handler)


_BEAT = 1.0
"""Seconds between two signs of life."""
_GRACE = 15.0
"""Seconds beyond the time-out of ranks after which a process without a sign of life is taken to
hang. Hangs that Python code can notice, the world notices before that."""
_PRINTED = "printed"
"""The file for the output of jobs. It exists if the output is to be kept."""
_MOST_PRINTED = 100_000
"""The most characters of the output that are kept."""
_STACK = "stack"
"""The file for Python's own report of a crash."""
_LINES = 3
"""The most lines of the report that are shown."""
_WHEN = {
    Phase.NOT_CALLED: "before it called the kernel",
    Phase.IN_CALL: "on this problem",
    Phase.BETWEEN: "on this problem",
    Phase.DONE: "after it had run this problem",
}
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that usually come from another process. A fault of the process sends other signals."""
_LOSSGATE = str(Path(__file__).parents[1])


class Job(Protocol):
    """Work for a child, as data that pickles."""

    def load(self) -> None:
        """Imports the candidates. State that their modules set on import is not restored."""
        ...

    def run(self) -> Any: ...


class News(Enum):
    """News from a child while a job runs."""

    AGREES = auto()
    """The cell agrees with the reference. Its further properties are checked next."""


_parent = list[Connection]()
"""The connection to the parent, if this process is a child."""


class ChildDied(Exception):
    """A child ended before it reported the result of its job."""

    def __init__(self, ended: str, ran: Ran | None = None, *, from_outside: bool = False) -> None:
        super().__init__(ended)
        self.ended = ended
        """How it ended, as words that follow "the process", and the lines of Python before that."""
        self.ran = ran
        """The problem that it ran last; None if it had run none."""
        self.from_outside = from_outside
        """Whether something outside may have ended it. For example, the system ends processes if
        memory runs out."""

    @property
    def how(self) -> str:
        """How and when it ended, as words that follow "the process", with the lines of Python."""
        first, *stack = self.ended.splitlines()
        return "\n".join((f"{first} {self._when}", *stack))

    @property
    def _when(self) -> str:
        if self.ran is None:
            return "before it ran a problem"
        after_a_call = self.ran.phase is not Phase.NOT_CALLED
        if after_a_call and not self.is_by_kernel:
            return "while the kernel was not called"
        return _WHEN[self.ran.phase]

    @property
    def is_by_kernel(self) -> bool:
        """Whether the kernel ended the process.

        It did so if the process ended in a call of the kernel. If the process ended later, and
        nothing outside ended it, the kernel may have overwritten memory, so it counts, too.
        """
        phase = None if self.ran is None else self.ran.phase
        return phase is Phase.IN_CALL or (phase in (Phase.BETWEEN, Phase.DONE) and not self.from_outside)


class Child:
    """A process that runs jobs, one after the other.

    Args:
        captured: whether the output of jobs is kept in ``printed`` and not shown.
    """

    def __init__(self, *, captured: bool = False) -> None:
        self.connection, far = Pipe()
        self.folder = new_folder()
        if captured:
            Path(self.folder, _PRINTED).touch()
        self._process = start_process(_serve, far, dict(os.environ), self.folder, has_children=True)
        far.close()  # or else the connection would stay open after the process has ended
        self._beat, self._beat_seen = 0, time.monotonic()
        self._hangs = ""
        self.threads_left = 0
        """How many threads candidates have left running in it."""

    def start(self, job: Job) -> None:
        """Starts a job. ``result`` returns its result."""
        with suppress(OSError):  # the process has died, and ``result`` will raise that
            self.connection.send(job)

    def check_alive(self, timeout: float) -> None:
        """Ends the process if it gives no sign of life, because C code may hold Python's lock."""
        beat = current_case.last_beat(self.folder)
        if beat != self._beat or not beat:
            self._beat, self._beat_seen = beat, time.monotonic()
        elif (silent := time.monotonic() - self._beat_seen) > timeout + _GRACE:
            self._hangs = f"gave no sign of life for {silent:.0f} s, and was ended"
            self._process.kill()

    def result(self) -> Any:
        """Waits for the next message: ``News`` while the job runs, or the job's result. Raises the
        exception of the job, if it raised one.

        Raises:
            ChildDied: if the process ended before it sent a message.
        """
        try:
            answer, self.threads_left = self.connection.recv()
        except Exception:  # the connection is closed, or the candidate wrote into it
            raise self._died() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def run(self, job: Job, timeout: float) -> Any:
        """Runs a job, and returns or raises the same as ``result``."""
        self.start(job)
        while not self.connection.poll(_BEAT):
            self.check_alive(timeout)
        return self.result()

    @property
    def printed(self) -> str:
        """The output of the last job, up to a limit."""
        try:
            with Path(self.folder, _PRINTED).open(errors="replace") as file:
                return file.read(_MOST_PRINTED)
        except OSError:
            return ""

    def end(self) -> None:
        """Ends the process, even in the middle of a job."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        remove_folder(self.folder)

    def _died(self) -> ChildDied:
        self._process.join(_BEAT)
        if self._process.exitcode is None:
            self._hangs = "cut its connection to lossgate"
            self._process.kill()
            self._process.join()
        ended = self._hangs or f"{_how(self._process.exitcode)}{_stack(self.folder)}"
        from_outside = not self._hangs and -(self._process.exitcode or 0) in _FROM_OUTSIDE
        return ChildDied(ended, current_case.read(self.folder), from_outside=from_outside)


def _how(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    by_system = ", as the system does with a process that takes too much memory," if name == "SIGKILL" else ""
    return f"was ended by {name}{by_system}"


def _stack(folder: str) -> str:
    """Returns lines of Python's report of a crash: the frames outside lossgate."""
    try:
        lines = Path(folder, _STACK).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    found = [line for line in lines if line.startswith("  File ") and _LOSSGATE not in line]
    return "".join(f"\n{line}" for line in found[:_LINES])


def _serve(connection: Connection, environment: Mapping[str, str], folder: str) -> None:
    """Runs the jobs that the parent sends, until the connection is closed."""
    start_worker(environment, lambda: remove_folder(folder))
    take_folder(folder)
    if (output := Path(folder, _PRINTED)).exists():
        print_to(str(output))
    print_by_line()  # so that the output of a kernel that crashes is not lost
    current_case.open_in(folder)
    _parent[:] = [connection]
    threading.Thread(target=_beat_on, daemon=True).start()
    torch.set_num_threads(1)  # the processes share the cores
    with suppress(EOFError, OSError), Path(folder, _STACK).open("w") as stack:
        faulthandler.enable(stack, all_threads=False)
        while True:
            connection.send(_run(connection.recv()))


def tell(news: News) -> None:
    """Sends news about the current job to the parent, if this process is a child."""
    for connection in _parent:
        connection.send((news, 0))


def _run(job: Job) -> tuple[Any, int]:
    """Runs a job. Returns its result or exception, and the number of threads left running."""
    threads = threading.active_count()
    current_case.none_yet()
    forget_printed()
    try:
        job.load()
        before = LeftBehind.capture()
        try:
            answer = job.run()
        finally:
            before.restore()
            sys.stdout.flush()
    except Exception as error:
        error.add_note(traceback.format_exc())
        answer = error
    return answer, threading.active_count() - threads


def forget_printed() -> None:
    """Empties the file for the output, if there is one."""
    sys.stdout.flush()
    with suppress(OSError):
        os.truncate(Path(process_folder(), _PRINTED), 0)


def _beat_on() -> None:
    while True:
        current_case.beat()
        time.sleep(_BEAT)
