# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads in lockstep: exactly one runs at any time, and hands the baton on when it blocks or ends.

So a run is deterministic, a deadlock shows at once (nobody can take the baton), and no lock is needed around what the
ranks share. Threads, not greenlets: torch's grad mode is thread-local and would leak from rank to rank. The threads
live from run to run, because a thread's first torch operations are slow.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from lossgate.errors import LossgateError
from lossgate.worlds.base import Deadlock, Hang, RankRaised
from lossgate.worlds.simulated.call_sites import raise_site, stack_of


class Unwind(BaseException):
    """Raised in ranks whose run has failed elsewhere, to end them; never reported as a cause.

    Not an ``Exception``, so that a kernel's ``except Exception`` does not swallow it.
    """


class Wait(Protocol):
    """What a rank waits for."""

    def describe(self) -> str:
        """For a deadlock's message: the pending call, who is missing, and the call site."""
        ...


class _State(Enum):
    READY = "ready"
    BLOCKED = "blocked"
    DONE = "done"


@dataclass
class _Rank:
    baton: threading.Semaphore
    thread: threading.Thread | None = None
    state: _State = _State.DONE
    waits_for: Wait | None = None
    result: Any = None


class Lockstep:
    """``size`` rank threads. ``current`` is the rank that holds the baton."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self.current = 0
        self.failure: BaseException | None = None
        self.dead = False
        """A rank hangs in code that can't be interrupted; this lockstep will run nothing more."""
        self._name = name
        self._ranks = [_Rank(threading.Semaphore(0)) for _ in range(size)]
        self._driver = threading.Semaphore(0)
        self._handed = 0
        """How often the baton was; while that grows, no rank hangs."""
        self._body: Callable[[int], Any] | None = None
        for rank, slot in enumerate(self._ranks):
            slot.thread = threading.Thread(target=self._serve, args=(rank,), daemon=True, name=f"{name}-rank{rank}")
            slot.thread.start()

    def run(self, body: Callable[[int], Any], timeout: float) -> list[Any]:
        """Run ``body(rank)`` on every rank. Raises the first failure, when every rank has been unwound."""
        assert not self.dead
        self._body, self.failure = body, None
        for slot in self._ranks:
            slot.state, slot.waits_for, slot.result = _State.READY, None, None
        self._hand_to(0)
        handed = 0
        while not self._driver.acquire(timeout=timeout):
            if handed == self._handed:
                self._interrupt(timeout)
                break
            handed = self._handed
        if self.failure is not None:
            raise self.failure
        return [slot.result for slot in self._ranks]

    def close(self) -> None:
        """End the threads. Those of a dead lockstep are daemons, and are left behind."""
        self._body = None
        if not self.dead:
            for slot in self._ranks:
                slot.baton.release()
            for slot in self._ranks:
                assert slot.thread is not None
                slot.thread.join()

    # In rank threads

    def block(self, wait: Wait) -> None:
        """Give the baton away until somebody calls ``unblock`` for this rank. Raises ``Unwind`` if the run fails meanwhile."""
        rank = self.current
        slot = self._ranks[rank]
        slot.state, slot.waits_for = _State.BLOCKED, wait
        successor = self._successor(rank)
        if successor is None:
            self.fail(Deadlock(self._deadlock_message()))
        else:
            self._hand_to(successor)
            slot.baton.acquire()
        slot.state, slot.waits_for = _State.READY, None
        self.check()

    def unblock(self, rank: int) -> None:
        """Let a blocked rank have the baton again, in its turn."""
        if self._ranks[rank].state is _State.BLOCKED:
            self._ranks[rank].state = _State.READY

    def fail(self, failure: BaseException) -> None:
        """Note why the run fails, unless it has failed already."""
        if self.failure is None:
            self.failure = failure

    def check(self) -> None:
        """Raise ``Unwind`` in a run that has failed."""
        if self.failure is not None:
            raise Unwind

    def rank_of_this_thread(self) -> int | None:
        here = threading.current_thread()
        return next((rank for rank, slot in enumerate(self._ranks) if slot.thread is here), None)

    def waits_for(self, rank: int) -> Wait | None:
        return self._ranks[rank].waits_for

    def _serve(self, rank: int) -> None:
        torch.autograd.set_multithreading_enabled(False)
        slot = self._ranks[rank]
        while True:
            slot.baton.acquire()
            if self._body is None:
                return
            try:
                if self.failure is None:
                    slot.result = self._body(rank)
            except Unwind:
                pass
            except BaseException as error:  # whatever a kernel raises is its result
                self.fail(_as_failure(error, rank))
            slot.state = _State.DONE
            if self.dead:
                return
            self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Called by a rank that is done."""
        successor = self._successor(rank)
        if successor is not None:
            self._hand_to(successor)
        elif all(slot.state is _State.DONE for slot in self._ranks):
            self._driver.release()
        else:
            self.fail(Deadlock(self._deadlock_message()))
            self._pass_on(rank)

    def _successor(self, rank: int) -> int | None:
        """The next rank, round robin, that can run; in a failed run blocked ranks can, to unwind."""
        for step in range(1, self.size):
            candidate = (rank + step) % self.size
            state = self._ranks[candidate].state
            if state is _State.READY or (state is _State.BLOCKED and self.failure is not None):
                return candidate
        return None

    def _hand_to(self, rank: int) -> None:
        self.current = rank
        self._handed += 1
        self._ranks[rank].baton.release()

    def _deadlock_message(self) -> str:
        lines = ["deadlock: no rank can go on"]
        for rank, slot in enumerate(self._ranks):
            doing = slot.waits_for.describe() if slot.waits_for else "has returned"
            lines.append(f"  rank {rank}: {doing}")
        return "\n".join(lines)

    # In the driver

    def _interrupt(self, timeout: float) -> None:
        """A rank has held the baton for too long: unwind it if it runs Python, give the threads up if it does not."""
        rank = self.current
        thread = self._ranks[rank].thread
        assert thread is not None
        assert thread.ident is not None
        self.fail(
            Hang(
                f"hang: rank {rank} neither reached a collective nor returned within {timeout:g} s; it is at\n{stack_of(thread)}"
            )
        )
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Unwind))
        if not self._driver.acquire(timeout=1.0):
            self.dead = True
            for other in self._ranks:  # they find the failure and end
                other.baton.release()


def _as_failure(error: BaseException, rank: int) -> BaseException:
    """An exception of a kernel, told with its rank and call site; errors of ours pass as they are."""
    if isinstance(error, LossgateError):
        return error
    failure = RankRaised(f"rank {rank} raised {type(error).__name__}: {error}  [{raise_site(error)}]", rank)
    failure.__cause__ = error
    return failure
