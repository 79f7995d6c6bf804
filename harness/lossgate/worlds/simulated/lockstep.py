# SPDX-License-Identifier: Apache-2.0
"""Runs ranks as threads in lockstep: one runs at a time, and passes a baton when it blocks or ends.

A run is therefore deterministic, a deadlock shows at once because no rank can take the baton, and
shared state needs no lock. With the baton, ranks also exchange the state that a process has only
once, such as the default dtype, so that each rank sees its own. Ranks are threads, not greenlets,
because torch's grad mode is thread-local and would leak from one greenlet to another. The threads
live from run to run, because a thread's first torch operations are slow.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from lossgate.base.errors import LossgateError
from lossgate.worlds.base import Deadlock, Hang, RankRaised
from lossgate.worlds.call_sites import own_fault, raise_site, stack_of
from lossgate.worlds.process_state import SharedState


class Unwind(BaseException):
    """Ends a rank whose run has failed elsewhere. It is never reported as the cause.

    It is not an ``Exception``, so that a kernel's ``except Exception`` does not swallow it.
    """


class Wait(Protocol):
    """Something that a blocked rank waits for."""

    def describe(self) -> str:
        """Returns the pending call, the ranks that it waits for, and its call site.

        The message of a deadlock has this line for each blocked rank.
        """
        ...


class _State(Enum):
    READY = "ready"
    BLOCKED = "blocked"
    DONE = "done"


@dataclass
class _Rank:
    baton: threading.Lock
    shared: SharedState
    """The state of the process as the rank left it when it passed the baton on."""
    thread: threading.Thread | None = None
    state: _State = _State.DONE
    waits_for: Wait | None = None
    result: Any = None


class Lockstep:
    """The rank threads of a world, and the baton that lets one of them run.

    Args:
        size: the number of ranks.
        name: the prefix of the threads' names.
    """

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        self.current = 0
        """The rank that holds the baton."""
        self.failure: BaseException | None = None
        """Why the run fails: the first failure of a rank."""
        self.running = False
        """Whether a run is under way."""
        self.dead = False
        """True if a run was given up, as when a rank can't be interrupted. No run follows then."""
        self._name = name
        self._ranks = [_Rank(_taken(), SharedState.capture()) for _ in range(size)]
        self._driver = _taken()
        self._here = threading.local()
        """Its ``rank`` is the rank of the current thread. Threads of no rank do not have it."""
        self._handovers = 0
        """How often the baton was passed. No rank hangs while this grows."""
        self._interrupting = threading.Lock()
        """Held by the driver to interrupt a rank, and by the rank with the baton to prevent it."""
        self._interruptible = False
        """Whether the rank with the baton runs the body, and is not about to pass the baton on."""
        self._interrupted = False
        """Whether the driver has interrupted a rank of this run. It does so at most once."""
        self._body: Callable[[int], Any] | None = None
        for rank, slot in enumerate(self._ranks):
            slot.thread = threading.Thread(target=self._serve, args=(rank,), daemon=True, name=f"{name}-rank{rank}")
            slot.thread.start()

    def run(self, body: Callable[[int], Any], timeout: float) -> list[Any]:
        """Runs ``body(rank)`` on every rank.

        Args:
            body: receives the rank.
            timeout: seconds after which a rank that keeps the baton is taken to hang.

        Returns:
            The results of the body, by rank.

        Raises:
            BaseException: the first failure, once every rank has ended.
        """
        assert not self.dead
        self._body, self.failure, self.running, self._interrupted = body, None, True, False
        shared = SharedState.capture()
        for slot in self._ranks:
            slot.state, slot.waits_for, slot.result, slot.shared = _State.READY, None, None, shared
        self._hand_to(0)
        try:
            self._wait(timeout)
        except BaseException as interrupt:  # Ctrl-C: nobody waits for ranks that are under way
            self._give_up(interrupt)
            raise
        finally:
            self.running = False
        if self.failure is not None:
            raise self.failure
        return [slot.result for slot in self._ranks]

    def close(self) -> None:
        """Ends the threads. A dead lockstep leaves them behind; they are daemons."""
        self._body = None
        if not self.dead:
            for slot in self._ranks:
                slot.baton.release()
            for slot in self._ranks:
                assert slot.thread is not None
                slot.thread.join()

    # The methods below run in rank threads.

    def block(self, wait: Wait) -> None:
        """Passes the baton on, and returns once ``unblock`` was called for this rank.

        Args:
            wait: describes what the rank waits for, in case of a deadlock.

        Raises:
            Unwind: the run fails meanwhile, or fails now because no rank can take the baton.
        """
        rank = self.current
        slot = self._ranks[rank]
        slot.state, slot.waits_for = _State.BLOCKED, wait
        successor = self._successor(rank)
        if successor is None:
            self.fail(Deadlock(self._deadlock_message()))
        else:
            self._rule_out_interrupts()
            self._exchange(rank, successor)
            slot.baton.acquire()
            self._interruptible = True
        slot.state, slot.waits_for = _State.READY, None
        self.check()

    def unblock(self, rank: int) -> None:
        """Lets a blocked rank have the baton again in its turn. Does nothing to other ranks."""
        if self._ranks[rank].state is _State.BLOCKED:
            self._ranks[rank].state = _State.READY

    def fail(self, failure: BaseException) -> None:
        """Records why the run fails, unless it has failed already."""
        if self.failure is None:
            self.failure = failure

    def check(self) -> None:
        """Raises ``Unwind`` if the run has failed."""
        if self.failure is not None:
            raise Unwind

    def rank_of_this_thread(self) -> int | None:
        """Returns the rank whose thread calls this, or None in any other thread."""
        return getattr(self._here, "rank", None)

    def waits_for(self, rank: int) -> Wait | None:
        """Returns what a rank waits for, or None if it is not blocked."""
        return self._ranks[rank].waits_for

    def _serve(self, rank: int) -> None:
        torch.autograd.set_multithreading_enabled(False)
        slot, self._here.rank = self._ranks[rank], rank
        while True:
            slot.baton.acquire()
            if self._body is None:
                return
            try:
                self._interruptible = True
                self._run_body(rank)
                self._rule_out_interrupts()
            except Unwind:  # it came after the body's last line
                self._rule_out_interrupts()
            slot.state = _State.DONE
            if self.dead:
                return
            self._pass_on(rank)

    def _run_body(self, rank: int) -> None:
        assert self._body is not None
        try:
            if self.failure is None:
                self._ranks[rank].result = self._body(rank)
        except Unwind:
            pass
        except BaseException as error:  # a kernel may raise anything, even SystemExit
            self.fail(_as_failure(error, rank))

    def _rule_out_interrupts(self) -> None:
        """Keeps the driver from interrupting this rank, which is about to pass the baton on.

        Raises:
            Unwind: the driver interrupted the rank just before. A second call then does not raise.
        """
        with self._interrupting:
            self._interruptible = False
        if self._interrupted:  # the exception may be still to come: a second one replaces it, and is caught here
            with suppress(Unwind):
                _raise_in(threading.get_ident(), Unwind)
                while True:
                    time.sleep(0)

    def _pass_on(self, rank: int) -> None:
        """Passes the baton on from a rank that is done, or ends the run if all ranks are done."""
        successor = self._successor(rank)
        if successor is not None:
            self._exchange(rank, successor)
        elif all(slot.state is _State.DONE for slot in self._ranks):
            self._driver.release()
        else:
            self.fail(Deadlock(self._deadlock_message()))
            self._pass_on(rank)

    def _successor(self, rank: int) -> int | None:
        """Returns the next rank, round robin, that can run, or None.

        In a failed run blocked ranks can run too, in order to unwind.
        """
        for step in range(1, self.size):
            candidate = (rank + step) % self.size
            state = self._ranks[candidate].state
            if state is _State.READY or (state is _State.BLOCKED and self.failure is not None):
                return candidate
        return None

    def _exchange(self, rank: int, successor: int) -> None:
        """Passes the baton on, and restores the state of the process that the successor left."""
        self._ranks[rank].shared = self._ranks[successor].shared.restore()
        self._hand_to(successor)

    def _hand_to(self, rank: int) -> None:
        self.current = rank
        self._handovers += 1
        self._ranks[rank].baton.release()

    def _deadlock_message(self) -> str:
        lines = ["deadlock: no rank can go on"]
        for rank, slot in enumerate(self._ranks):
            doing = slot.waits_for.describe() if slot.waits_for else "has returned"
            lines.append(f"  rank {rank}: {doing}")
        return "\n".join(lines)

    # The methods below run in the thread that called ``run``.

    def _wait(self, timeout: float) -> None:
        """Waits until all ranks are done, or until one hangs."""
        seen = 0
        while not self._driver.acquire(timeout=timeout):
            no_handover, seen = seen == self._handovers, self._handovers
            if no_handover and self._interrupt(timeout):
                unwound = self._driver.acquire(timeout=1.0)
                if not unwound:
                    assert self.failure is not None
                    self._give_up(self.failure)
                return

    def _give_up(self, failure: BaseException) -> None:
        """Leaves the threads behind. Each ends by itself, when it next looks for a failure."""
        self.fail(failure)
        self.dead = True
        for slot in self._ranks:
            with suppress(RuntimeError):  # it has just got the baton from a rank that went on after all
                slot.baton.release()

    def _interrupt(self, timeout: float) -> bool:
        """Fails the run because a rank has held the baton for too long, and unwinds the rank.

        Returns:
            Whether it interrupted the rank. False if the rank is just passing the baton on, so that
            nothing hangs.
        """
        with self._interrupting:
            if not self._interruptible:
                return False
            rank = self.current
            thread = self._ranks[rank].thread
            assert thread is not None
            assert thread.ident is not None
            self.fail(
                Hang(
                    f"hang: rank {rank} neither reached a collective nor returned within {timeout:g} s; "
                    f"it is at\n{stack_of(thread.ident)}"
                )
            )
            self._interrupted = True
            _raise_in(thread.ident, Unwind)
            return True


def _raise_in(thread: int, exception: type[BaseException]) -> None:
    """Raises an exception in a thread as soon as the thread runs Python code.

    The exception is never taken back, as C can do with NULL: CPython 3.11 would then look for it
    ever after, and loop for ever in the next function that is traced.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))


def _taken() -> threading.Lock:
    """Returns a lock for one thread to wait for and another to release. A semaphore takes twice as
    long.
    """
    lock = threading.Lock()
    lock.acquire()
    return lock


def _as_failure(error: BaseException, rank: int) -> BaseException:
    """Returns an error that names the rank and line of a kernel's exception. Returns lossgate's own
    errors, and exceptions that are its fault, as they are.
    """
    if (fault := own_fault(error)) is not None or isinstance(error, LossgateError):
        return fault or error
    kind, site = type(error).__name__, raise_site(error)
    failure = RankRaised(f"rank {rank} raised {kind}: {error}  [{site}]", rank, kind, site)
    failure.__cause__ = error
    return failure
