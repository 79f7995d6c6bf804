# SPDX-License-Identifier: Apache-2.0
"""The meeting point of a group: matches the n-th calls of all members, and completes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lossgate.numerics.torch_operations import unobserved
from lossgate.worlds.base import CollectiveMismatch
from lossgate.worlds.simulated.collectives import Call, Complete
from lossgate.worlds.simulated.communicator import Communicator, Logged


@dataclass
class _PendingCall:
    """A rank's wait for the other members of a call."""

    rendezvous: "Rendezvous"
    call: Call

    def describe(self) -> str:
        arrived = {call.rank for call in self.rendezvous.pending.get(self.call.number, {}).values()}
        missing = [rank for rank in self.rendezvous.ranks if rank not in arrived]
        return f"in {self.call} #{self.call.number} on {self.rendezvous}, waits for ranks {missing}  [{self.call.site}]"


class Rendezvous:
    """The meeting point that the members of one group share.

    Args:
        communicator: the state that the ranks of the world share.
        ranks: the members, as ranks of the world, in the order of their group ranks.
        label: the name of the group in messages and in the log.
    """

    def __init__(self, communicator: Communicator, ranks: Sequence[int], label: str) -> None:
        self.communicator = communicator
        self.ranks = tuple(ranks)
        self.label = label
        self.pending: dict[int, dict[int, Call]] = {}
        """Calls that some members have yet to make: by number, then by group rank."""
        self._posted = [0] * len(self.ranks)

    def __str__(self) -> str:
        return f"{self.label}{list(self.ranks)}"

    def reset(self) -> None:
        """Forgets the calls of the previous run."""
        self.pending, self._posted = {}, [0] * len(self.ranks)

    def post(self, call: Call, complete: Complete) -> None:
        """Adds a member's call. If it is the last one missing, does the work for all members.

        Args:
            call: the call; its ``number`` is set here.
            complete: does the work, given the calls of all members.

        Raises:
            CollectiveMismatch: the call disagrees with one that another member has already made.
            Unwind: the run has failed elsewhere.
        """
        self.communicator.lockstep.check()
        member = self.ranks.index(call.rank)
        call.number = self._posted[member]
        self._posted[member] += 1
        arrived = self.pending.setdefault(call.number, {})
        self._check_agreement(call, arrived)
        arrived[member] = call
        self.communicator.log.append(Logged(call.rank, str(self), call.collective, call.shown, call.bytes))
        if len(arrived) == len(self.ranks):
            calls = [arrived[i] for i in range(len(self.ranks))]
            with torch.no_grad(), unobserved():
                complete(calls)
            del self.pending[call.number]
            for waiting in calls:
                waiting.done = True
                self._wake(waiting)

    def wait(self, call: Call) -> None:
        """Blocks the calling rank until the call is complete."""
        while not call.done:
            self.communicator.lockstep.block(_PendingCall(self, call))

    def _check_agreement(self, call: Call, arrived: dict[int, Call]) -> None:
        other = next(iter(arrived.values()), None)  # one is enough, because all that have arrived agree
        if other is not None and (other.collective, other.agreed) != (call.collective, call.agreed):
            both = sorted((other, call), key=lambda c: c.rank)
            lines = "\n".join(f"  rank {c.rank}: {c}  [{c.site}]" for c in both)
            raise CollectiveMismatch(f"collective mismatch on {self} at call #{call.number}:\n{lines}")

    def _wake(self, call: Call) -> None:
        wait = self.communicator.lockstep.waits_for(call.rank)
        if isinstance(wait, _PendingCall) and wait.call is call:
            self.communicator.lockstep.unblock(call.rank)
