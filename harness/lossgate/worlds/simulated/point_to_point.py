# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages: a send waits for its receive, and receives get messages in order.

Some real libraries buffer a send. A kernel that needs no buffer works with all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.numerics.torch_operations import unobserved
from lossgate.worlds.base import CollectiveMismatch, CollectiveMisuse
from lossgate.worlds.simulated.collectives import show
from lossgate.worlds.simulated.communicator import Communicator, Logged, Mailbox, Route
from lossgate.worlds.simulated.in_flight import Watch, poison
from lossgate.worlds.simulated.rendezvous import Rendezvous


@dataclass
class _PendingMessage:
    """A rank's wait for the other side of a message."""

    shown: str
    mailbox: Mailbox
    met: Callable[[], bool]
    """Returns whether the other side has posted."""

    def describe(self) -> str:
        return self.shown


def send(rendezvous: Rendezvous, me: int, tensor: Tensor, to: int, tag: int, site: str) -> Callable[[], None]:
    """Posts a send and returns at once. The message is a copy of the tensor.

    Args:
        rendezvous: the meeting point of the group.
        me: the sender's rank in the world.
        tensor: the message.
        to: the receiver's rank in the world.
        tag: a message is received only under the tag under which it was sent.
        site: the line of the kernel that sends.

    Returns:
        The wait, a function to be called once. It blocks until the receive is posted, and raises
        ``CollectiveMisuse`` if the tensor changed meanwhile.

    Raises:
        Unwind: the run has failed elsewhere.
    """
    communicator = rendezvous.communicator
    communicator.lockstep.check()
    mailbox = communicator.mail.setdefault(Route(id(rendezvous), me, to, tag), Mailbox())
    number, shown = len(mailbox.sent), f"send({show(tensor)}) to rank {to} on {rendezvous}, tag {tag}"
    with unobserved():
        mailbox.sent.append(tensor.detach().clone())
    mailbox.unwaited_sends[number] = f"{shown}  [{site}]"
    communicator.log.append(
        Logged(me, str(rendezvous), "send", f"{show(tensor)} to rank {to}", tensor.numel() * tensor.element_size())
    )
    watch = Watch([tensor])
    _wake(communicator, to, mailbox)

    def finish() -> None:
        del mailbox.unwaited_sends[number]
        _check_unwritten(watch, me, shown, site)
        waits = f"in {shown}, waits for its receive  [{site}]"
        _wait(communicator, _PendingMessage(waits, mailbox, lambda: mailbox.received > number))

    return finish


def receive(rendezvous: Rendezvous, me: int, tensor: Tensor, source: int, tag: int, site: str) -> Callable[[], None]:
    """Posts a receive and returns at once. The tensor is poisoned until the wait.

    Args:
        rendezvous: the meeting point of the group.
        me: the receiver's rank in the world.
        tensor: the tensor that the message is copied into.
        source: the sender's rank in the world.
        tag: the tag under which the message is sent.
        site: the line of the kernel that receives.

    Returns:
        The wait, a function to be called once. It blocks until the message is there. It raises
        ``CollectiveMisuse`` if the rank wrote to the tensor meanwhile, and ``CollectiveMismatch``
        if the message differs from the tensor in shape or dtype.

    Raises:
        Unwind: the run has failed elsewhere.
    """
    communicator = rendezvous.communicator
    communicator.lockstep.check()
    mailbox = communicator.mail.setdefault(Route(id(rendezvous), source, me, tag), Mailbox())
    number, shown = mailbox.received, f"recv({show(tensor)}) from rank {source} on {rendezvous}, tag {tag}"
    mailbox.received += 1
    mailbox.unwaited_receives[number] = f"{shown}  [{site}]"
    with torch.no_grad(), unobserved():
        poison(tensor.detach())
    watch = Watch([tensor])
    _wake(communicator, source, mailbox)

    def finish() -> None:
        del mailbox.unwaited_receives[number]
        _check_unwritten(watch, me, shown, site)
        _wait(communicator, _PendingMessage(f"in {shown}  [{site}]", mailbox, lambda: len(mailbox.sent) > number))
        message = mailbox.sent[number]
        if (message.shape, message.dtype) != (tensor.shape, tensor.dtype):
            raise CollectiveMismatch(
                f"rank {me} receives {show(tensor)}, but rank {source} sent {show(message)}  [{site}]"
            )
        with torch.no_grad(), unobserved():
            tensor.copy_(message)

    return finish


def check_mail(communicator: Communicator) -> None:
    """Checks at the end of a run that every message was received and every call was waited for.

    Raises:
        CollectiveMisuse: a rank posted a send or a receive and returned without ``wait()``.
        CollectiveMismatch: such a send was never received.
    """
    for route, mailbox in communicator.mail.items():
        if receives := [*mailbox.unwaited_receives.values()]:
            raise CollectiveMisuse(f"rank {route.to} returned without wait() on {receives[0]}")
        if sends := [*mailbox.unwaited_sends.items()]:
            number, shown = sends[0]
            if number >= mailbox.received:
                raise CollectiveMismatch(
                    f"rank {route.source} made a send that rank {route.to} never received: {shown}"
                )
            raise CollectiveMisuse(f"rank {route.source} returned without wait() on {shown}")


def _wait(communicator: Communicator, pending: _PendingMessage) -> None:
    while not pending.met():
        communicator.lockstep.block(pending)


def _wake(communicator: Communicator, rank: int, mailbox: Mailbox) -> None:
    """Unblocks a rank that was waiting for what has just come to the mailbox."""
    wait = communicator.lockstep.waits_for(rank)
    if isinstance(wait, _PendingMessage) and wait.mailbox is mailbox and wait.met():
        communicator.lockstep.unblock(rank)


def _check_unwritten(watch: Watch, me: int, shown: str, site: str) -> None:
    """Raises ``CollectiveMisuse`` if the rank wrote to the tensor of its message in flight."""
    if watch.written() is not None:
        raise CollectiveMisuse(
            f"rank {me}: the tensor of {shown} was changed before wait(); "
            f"call wait() first, or use another tensor  [{site}]"
        )
