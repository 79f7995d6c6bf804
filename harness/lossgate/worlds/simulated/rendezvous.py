# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a group meet: pairs the n-th call of each member, checks that they agree, and completes them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lossgate.problems.problem import ReductionOrder
from lossgate.worlds.base import CollectiveMismatch, CollectiveMisuse
from lossgate.worlds.simulated.lockstep import Lockstep, Unwind

Complete = Callable[[Sequence["Call"]], None]
"""Does the work of a collective, given the calls of every member, by group rank."""


def show(tensor: Tensor) -> str:
    """``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(eq=False)
class Call:
    """One member's side of a collective."""

    rank: int
    """In the world."""
    collective: str
    agreed: tuple[Any, ...]
    """What every member must bring alike: reduce op, root, dtypes, shapes."""
    shown: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    splits: tuple[list[int], list[int]] = ([], [])
    """Rows sent to and received from each member, of an all_to_all."""
    number: int = 0
    site: str = ""
    done: bool = False

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.inputs)

    def __str__(self) -> str:
        return f"{self.collective}({self.shown})"


@dataclass(frozen=True)
class Logged:
    """One line of a world's log of communication."""

    rank: int
    group: str
    collective: str
    shown: str
    bytes: int


@dataclass
class Communicator:
    """What the ranks of a simulated world share: the lockstep, the reduction order and the log."""

    lockstep: Lockstep
    order: ReductionOrder = "rank"
    seed: int = 0
    log: list[Logged] = field(default_factory=list)
    reductions: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """So far, of the group of these ranks."""
    in_flight: list[tuple["Rendezvous", Call]] = field(default_factory=list)
    mail: dict["_Route", "_Mailbox"] = field(default_factory=dict)

    def start(self, order: ReductionOrder, seed: int) -> None:
        self.order, self.seed = order, seed
        self.reductions.clear()
        self.log, self.in_flight, self.mail = [], [], {}

    def running_rank(self) -> int | None:
        """The rank in whose thread this is called, if it is one of this world's."""
        return self.lockstep.rank_of_this_thread()

    def next_seed(self, ranks: Sequence[int]) -> int:
        """Counted by group: groups beside one another, such as each tp rank's over cp, add the same numbers up in the same order, and what is
        replicated over tp stays so, bit by bit."""
        group = tuple(ranks)
        self.reductions[group] += 1
        return self.seed * 1_000_003 + self.reductions[group]


@dataclass
class _Pending:
    """A rank's wait for the other members of a call."""

    rendezvous: "Rendezvous"
    call: Call

    def describe(self) -> str:
        arrived = {call.rank for call in self.rendezvous.pending.get(self.call.number, {}).values()}
        missing = [rank for rank in self.rendezvous.ranks if rank not in arrived]
        return f"in {self.call} #{self.call.number} on {self.rendezvous}, waits for ranks {missing}  [{self.call.site}]"


class Rendezvous:
    """Shared by the members of one group."""

    def __init__(self, communicator: Communicator, ranks: Sequence[int], label: str) -> None:
        self.communicator = communicator
        self.ranks = tuple(ranks)
        self.label = label
        self.pending: dict[int, dict[int, Call]] = {}
        self._posted = [0] * len(self.ranks)

    def __str__(self) -> str:
        return f"{self.label}{list(self.ranks)}"

    def reset(self) -> None:
        self.pending, self._posted = {}, [0] * len(self.ranks)

    def post(self, call: Call, complete: Complete) -> None:
        """Bring a call; the last member's completes it for all. Raises ``CollectiveMismatch`` at the first that differs."""
        lockstep, member = self.communicator.lockstep, self.ranks.index(call.rank)
        lockstep.check()
        call.number = self._posted[member]
        self._posted[member] += 1
        arrived = self.pending.setdefault(call.number, {})
        for other in arrived.values():
            if (other.collective, other.agreed) != (call.collective, call.agreed):
                both = sorted((other, call), key=lambda c: c.rank)
                told = "\n".join(f"  rank {c.rank}: {c}  [{c.site}]" for c in both)
                raise CollectiveMismatch(f"collective mismatch on {self} at call #{call.number}:\n{told}")
            break  # those that have arrived agree with one another
        arrived[member] = call
        self.communicator.log.append(Logged(call.rank, str(self), call.collective, call.shown, call.bytes))
        if len(arrived) == len(self.ranks):
            calls = [arrived[i] for i in range(len(self.ranks))]
            with torch.no_grad():
                complete(calls)
            del self.pending[call.number]
            for waiting in calls:
                waiting.done = True
                self._wake(waiting)

    def _wake(self, call: Call) -> None:
        wait = self.communicator.lockstep.waits_for(call.rank)
        if isinstance(wait, _Pending) and wait.call is call:
            self.communicator.lockstep.unblock(call.rank)

    def wait(self, call: Call) -> None:
        """Block until the call is complete."""
        while not call.done:
            self.communicator.lockstep.block(_Pending(self, call))

    def post_in_flight(self, call: Call, complete: Complete) -> Callable[[], None]:
        """Bring a call without waiting for it; returns the wait.

        The inputs are taken as they are now and the outputs poisoned until the wait, so that a kernel that touches
        either too early is seen.
        """
        inputs, outputs = call.inputs, call.outputs
        snapshots = {id(t): t.detach().clone() for t in [*inputs, *outputs]}
        call.inputs = [snapshots[id(t)] for t in inputs]
        call.outputs = [snapshots[id(t)] for t in outputs]  # in place: the very tensor of call.inputs
        written = {
            t.untyped_storage().data_ptr() for t in outputs
        }  # of calls in place, such as all_gather into the input's own rows
        unwritten = [(t, snapshots[id(t)].clone()) for t in inputs if t.untyped_storage().data_ptr() not in written]
        with torch.no_grad():
            for tensor in outputs:
                _poison(tensor.detach())
        self.communicator.in_flight.append((self, call))
        self.post(call, complete)

        def finish() -> None:
            if (self, call) not in self.communicator.in_flight:
                return
            self.wait(call)
            self.communicator.in_flight.remove((self, call))
            for tensor, old in unwritten:
                if not _same(tensor, old):
                    raise CollectiveMisuse(
                        f"rank {call.rank}: the input of {call} #{call.number} on {self} was changed before wait()  [{call.site}]"
                    )
            with torch.no_grad():
                for tensor, result in zip(outputs, call.outputs, strict=True):
                    tensor.detach().copy_(result)

        return finish


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        info = torch.iinfo(tensor.dtype)
        tensor.fill_(info.min or info.max)


@dataclass(frozen=True)
class _Route:
    """Messages between two ranks under one tag arrive in the order in which they were sent."""

    rendezvous: int
    source: int
    to: int
    tag: int


@dataclass
class _Mailbox:
    sent: list[tuple[Tensor, str]] = field(default_factory=list)
    """Messages, with the call sites that sent them."""
    received: int = 0
    """Receives that were posted; the n-th gets the n-th message, whenever it is waited for."""
    unwaited: dict[int, str] = field(default_factory=dict)


@dataclass
class _Delivery:
    """A rank's wait for a message."""

    shown: str
    mailbox: _Mailbox
    number: int

    def describe(self) -> str:
        return self.shown

    @property
    def arrived(self) -> bool:
        return len(self.mailbox.sent) > self.number


def send(rendezvous: Rendezvous, me: int, tensor: Tensor, to: int, tag: int, site: str) -> None:
    """Buffered: returns at once. ``check_mail`` tells what nobody received."""
    communicator = rendezvous.communicator
    communicator.lockstep.check()
    mailbox = communicator.mail.setdefault(_Route(id(rendezvous), me, to, tag), _Mailbox())
    mailbox.sent.append((tensor.detach().clone(), f"{show(tensor)} to rank {to} on {rendezvous}, tag {tag}  [{site}]"))
    communicator.log.append(
        Logged(me, str(rendezvous), "send", f"{show(tensor)} to rank {to}", tensor.numel() * tensor.element_size())
    )
    wait = communicator.lockstep.waits_for(to)
    if isinstance(wait, _Delivery) and wait.mailbox is mailbox and wait.arrived:
        communicator.lockstep.unblock(to)


def receive(rendezvous: Rendezvous, me: int, tensor: Tensor, source: int, tag: int, site: str) -> Callable[[], None]:
    """Post a receive, into a tensor that is poisoned until the wait; returns the wait."""
    communicator = rendezvous.communicator
    communicator.lockstep.check()
    mailbox = communicator.mail.setdefault(_Route(id(rendezvous), source, me, tag), _Mailbox())
    delivery = _Delivery(
        f"in recv({show(tensor)}) from rank {source} on {rendezvous}, tag {tag}  [{site}]", mailbox, mailbox.received
    )
    mailbox.unwaited[mailbox.received] = delivery.shown
    mailbox.received += 1
    with torch.no_grad():
        _poison(tensor.detach())

    def finish() -> None:
        del mailbox.unwaited[delivery.number]
        while not delivery.arrived:
            communicator.lockstep.block(delivery)
        message, _ = mailbox.sent[delivery.number]
        if (message.shape, message.dtype) != (tensor.shape, tensor.dtype):
            raise CollectiveMismatch(f"rank {me} receives {show(tensor)}, rank {source} sent {show(message)}  [{site}]")
        with torch.no_grad():
            tensor.copy_(message)

    return finish


def check_mail(communicator: Communicator) -> None:
    """At the end of a run: every message was received, and every receive waited for."""
    for route, mailbox in communicator.mail.items():
        for shown in mailbox.unwaited.values():
            raise CollectiveMisuse(f"rank {route.to} returned without wait() {shown}")
        if len(mailbox.sent) > mailbox.received:
            raise CollectiveMismatch(
                f"rank {route.source} sent what rank {route.to} never received: {mailbox.sent[mailbox.received][1]}"
            )


__all__ = ["Call", "Communicator", "Logged", "Rendezvous", "Unwind", "check_mail", "receive", "send", "show"]
