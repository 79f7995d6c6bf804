# SPDX-License-Identifier: Apache-2.0
"""The driver's side of a task: it sends the task to the ranks, waits, and stops those that hang."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Protocol

from lossgate.worlds.processes.rank_messages import (
    WHERE,
    Assignment,
    Begun,
    Loaded,
    Met,
    Raised,
    Reply,
    Returned,
    Stop,
    Stopped,
    Whereabouts,
)

_PATIENCE: Mapping[type, float] = {Begun: 120.0, Met: 60.0, Loaded: 120.0}
"""Seconds in which all ranks must reach a stage, once all have reached the stage before it.

Ranks of torchrun that are given up can't be replaced, so that all later tasks fail too. A minute
leaves four of them time to meet on a machine that is busy with other tests.
"""
_STAGES = (Begun, Met, Loaded)
_GRACE = 1.0
"""Seconds that ranks have to end after another has failed, and to answer where they are."""
_QUIET = 0.5
"""Seconds without news after which ranks are asked where they are."""
_MOST_TO_STOP = 20.0
"""Seconds after which a rank that must stop is killed in any case, even if it never answers. A rank
that makes its groups has more; see ``RankHandle.connecting``."""
_IDLE = 0.1
"""A rank that uses a smaller share of a core is waiting for something."""


@dataclass(frozen=True)
class Died:
    """The process of a rank ended."""

    how: str
    """``killed by SIGSEGV``, say."""
    output: str
    """The last lines that it wrote."""


Outcome = Returned | Raised | Stopped | Died


class RankHandle(Protocol):
    """The driver's end of a rank."""

    rank: int
    work: Connection
    alarm: Connection
    stopping: float
    """Seconds after which it is killed, once it must stop. Its processor seconds count, and seconds
    in which all ranks that must stop sleep. While one of them waits for a processor, the others may
    be waiting for it, and a busy machine is no fault of theirs."""
    connecting: float
    """More seconds while it makes its groups: gloo waits for a connection until its time is over,
    and nothing can interrupt that. After them the rank serves the next task."""

    def end(self) -> Died:
        """Waits until a process that is ending has ended, and returns how it did."""
        ...

    def kill(self) -> None: ...

    def printed(self) -> str:
        """Returns the text that the rank has printed since the last call."""
        ...


@dataclass
class TaskOutcome:
    """What became of a task."""

    timeout: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By rank, in the order in which they came."""
    stuck: dict[int, Whereabouts | None] = field(default_factory=dict)
    """Where each rank was that had to be stopped. None if it gave no answer."""
    code: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """For each rank that has loaded the task, a checksum of each module that is not installed."""
    deadlocked: bool = False
    """The ranks that had to be stopped were waiting in collectives."""
    met: bool = False
    """All ranks had made their groups."""

    @property
    def failed(self) -> bool:
        return any(not isinstance(outcome, Returned) for outcome in self.outcomes.values())

    @property
    def groups_agree(self) -> bool:
        """Whether all ranks of each group have made the same number of calls on it.

        If they have not, the next call of one rank would meet an earlier call of another.
        """
        counts: dict[str, set[int]] = {}
        for outcome in self.outcomes.values():
            for name, calls in outcome.calls.items() if isinstance(outcome, Returned) else ():
                counts.setdefault(name, set()).add(calls)
        return all(len(different) == 1 for different in counts.values())


def conduct(ranks: Sequence[RankHandle], assignment: Assignment, timeout: float) -> TaskOutcome:
    """Has ranks run a task, and returns when each is ready for the next task or has died.

    Args:
        ranks: the ranks of the assignment's layout.
        assignment: the task.
        timeout: seconds that they have for it.

    If the driver is interrupted, it stops the ranks before it raises.
    """
    return _Run(ranks, timeout).run(assignment)


class _Run:
    def __init__(self, ranks: Sequence[RankHandle], timeout: float) -> None:
        self._ranks = {handle.rank: handle for handle in ranks}
        self._record = TaskOutcome(timeout)
        self._number = -1
        self._stages: dict[int, int] = dict.fromkeys(self._ranks, 0)
        """The number of stages that each rank has completed."""
        self._deadline = time.monotonic() + _PATIENCE[Begun]
        self._last_seen: Mapping[int, Whereabouts | None] = {}

    def run(self, assignment: Assignment) -> TaskOutcome:
        self._number = assignment.number
        try:
            self._send(assignment)
            self._wait()
            if unfinished := [*self._unfinished()]:
                self._record.stuck = self._ask(unfinished)
        finally:  # also if the driver is interrupted
            self._stop([*self._unfinished()])
        return self._record

    def _send(self, assignment: Assignment) -> None:
        for handle in self._ranks.values():
            try:
                handle.work.send(assignment)
            except OSError:
                self._note(handle.rank, handle.end())

    def _wait(self) -> None:
        """Waits until all ranks have ended, until the deadline, or until they are in a deadlock."""
        while unfinished := [*self._unfinished()]:
            left = self._deadline - time.monotonic()
            if left <= 0:
                return
            quiet = not self._receive(unfinished, min(left, _QUIET))
            if quiet and self._all_loaded and not self._record.failed and self._are_deadlocked(unfinished):
                self._record.deadlocked = True
                return

    @property
    def _all_loaded(self) -> bool:
        return len(self._record.code) == len(self._ranks)

    def _unfinished(self) -> Iterator[RankHandle]:
        return (handle for rank, handle in self._ranks.items() if rank not in self._record.outcomes)

    def _receive(self, handles: Sequence[RankHandle], seconds: float) -> bool:
        """Takes the messages of ranks. Returns whether there were any."""
        ready = wait([handle.work for handle in handles], seconds)
        for handle in handles:
            if handle.work in ready:
                try:
                    reply: Reply = handle.work.recv()
                except (EOFError, OSError):
                    self._note(handle.rank, handle.end())
                    continue
                if reply.number == self._number:
                    self._note(handle.rank, reply.news)
        return bool(ready)

    def _note(self, rank: int, message: Begun | Met | Loaded | Outcome) -> None:
        if isinstance(message, Begun | Met | Loaded):
            if isinstance(message, Loaded):
                self._record.code[rank] = message.code
            before = min(self._stages.values())
            self._stages[rank] += 1
            now = min(self._stages.values())
            self._record.met = now >= _STAGES.index(Loaded)
            if now > before and not self._record.failed:
                patience = _PATIENCE[_STAGES[now]] if now < len(_STAGES) else self._record.timeout
                self._deadline = time.monotonic() + patience
            return
        self._record.outcomes[rank] = message
        if not isinstance(message, Returned):
            self._deadline = min(self._deadline, time.monotonic() + _GRACE)

    def _are_deadlocked(self, handles: Sequence[RankHandle]) -> bool:
        """Returns whether all ranks still wait in the collectives of their last answers."""
        before, self._last_seen = self._last_seen, self._ask(handles)
        return all(_waits(before.get(rank), now) for rank, now in self._last_seen.items())

    def _ask(self, handles: Sequence[RankHandle]) -> dict[int, Whereabouts | None]:
        for handle in handles:
            _ask_anew(handle.alarm)
        answers: dict[int, Whereabouts | None] = {}
        deadline = time.monotonic() + _GRACE
        for handle in handles:
            answers[handle.rank] = _answer(handle.alarm, deadline - time.monotonic())
        return answers

    def _stop(self, handles: Sequence[RankHandle]) -> None:
        for handle in handles:
            _send(handle.alarm, Stop(self._number))
        most = _MOST_TO_STOP + max((self._connecting(handle) for handle in handles), default=0.0)
        deadline, before = time.monotonic() + most, self._ask(handles)
        spent = dict.fromkeys(self._ranks, 0.0)
        while (unfinished := [*self._unfinished()]) and time.monotonic() < deadline:
            if self._receive(unfinished, _QUIET):
                continue
            now = self._ask(unfinished)
            all_sleep = not any(one is None or one.runnable for rank in now for one in (before[rank], now[rank]))
            for handle in unfinished:
                spent[handle.rank] += _QUIET if all_sleep else _cpu_seconds(before[handle.rank], now[handle.rank])
                if spent[handle.rank] >= handle.stopping + self._connecting(handle):
                    self._kill(handle)
            before = now
        for handle in [*self._unfinished()]:
            self._kill(handle)

    def _connecting(self, handle: RankHandle) -> float:
        """Returns how long a rank may still wait for others to connect, if it makes its groups."""
        return handle.connecting if self._stages[handle.rank] == _STAGES.index(Met) else 0.0

    def _kill(self, handle: RankHandle) -> None:
        handle.kill()
        self._record.outcomes[handle.rank] = Stopped()


def _cpu_seconds(before: Whereabouts | None, now: Whereabouts | None) -> float:
    """Returns the processor time that a rank has used between two answers."""
    return 0.0 if before is None or now is None else now.cpu_seconds - before.cpu_seconds


def _waits(before: Whereabouts | None, now: Whereabouts | None) -> bool:
    return (
        before is not None
        and now is not None
        and now.collective is not None
        and (before.collective, before.site) == (now.collective, now.site)
        and not before.runnable
        and not now.runnable
        and now.cpu_seconds - before.cpu_seconds < _IDLE * _QUIET
    )


def _ask_anew(alarm: Connection) -> None:
    while _answer(alarm, 0.0) is not None:
        pass  # the answer to an earlier question came too late
    _send(alarm, WHERE)


def _send(alarm: Connection, message: str | Stop) -> None:
    with suppress(OSError):  # the rank is gone; its work connection tells that too
        alarm.send(message)


def _answer(alarm: Connection, seconds: float) -> Whereabouts | None:
    try:
        return alarm.recv() if alarm.poll(max(seconds, 0.0)) else None
    except (EOFError, OSError):
        return None
