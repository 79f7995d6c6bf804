# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages: sends are buffered, and receives get them in the order of the sends."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lossgate.worlds.base import CollectiveMismatch, CollectiveMisuse
from lossgate.worlds.simulated.calls import show
from lossgate.worlds.simulated.communicator import Communicator, Logged, Mailbox, Route
from lossgate.worlds.simulated.in_flight import poison
from lossgate.worlds.simulated.rendezvous import Rendezvous


@dataclass
class _Delivery:
    """A rank's wait for a message."""

    shown: str
    mailbox: Mailbox
    number: int

    def describe(self) -> str:
        return self.shown

    @property
    def arrived(self) -> bool:
        return len(self.mailbox.sent) > self.number


def send(rendezvous: Rendezvous, me: int, tensor: Tensor, to: int, tag: int, site: str) -> None:
    """Sends a copy of a tensor and returns at once.

    ``check_mail`` reports a message that nobody receives.

    Args:
        rendezvous: the meeting point of the group.
        me: the sender's rank in the world.
        tensor: the message.
        to: the receiver's rank in the world.
        tag: a message is received only under the tag under which it was sent.
        site: the line of the kernel that sends.

    Raises:
        Unwind: the run has failed elsewhere.
    """
    communicator = rendezvous.communicator
    communicator.lockstep.check()
    mailbox = communicator.mail.setdefault(Route(id(rendezvous), me, to, tag), Mailbox())
    mailbox.sent.append((tensor.detach().clone(), f"{show(tensor)} to rank {to} on {rendezvous}, tag {tag}  [{site}]"))
    communicator.log.append(
        Logged(me, str(rendezvous), "send", f"{show(tensor)} to rank {to}", tensor.numel() * tensor.element_size())
    )
    wait = communicator.lockstep.waits_for(to)
    if isinstance(wait, _Delivery) and wait.mailbox is mailbox and wait.arrived:
        communicator.lockstep.unblock(to)


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
        The wait, to be called once. It blocks until the message is there, and raises
        ``CollectiveMismatch`` if the message differs from the tensor in shape or dtype.

    Raises:
        Unwind: the run has failed elsewhere.
    """
    communicator = rendezvous.communicator
    communicator.lockstep.check()
    mailbox = communicator.mail.setdefault(Route(id(rendezvous), source, me, tag), Mailbox())
    delivery = _Delivery(
        f"in recv({show(tensor)}) from rank {source} on {rendezvous}, tag {tag}  [{site}]", mailbox, mailbox.received
    )
    mailbox.unwaited[mailbox.received] = delivery.shown
    mailbox.received += 1
    with torch.no_grad():
        poison(tensor.detach())

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
    """Checks at the end of a run that every message was received and every receive was waited for.

    Raises:
        CollectiveMisuse: a rank posted a receive and returned without ``wait()``.
        CollectiveMismatch: a rank sent a message that no rank received.
    """
    for route, mailbox in communicator.mail.items():
        for shown in mailbox.unwaited.values():
            raise CollectiveMisuse(f"rank {route.to} returned without wait() on {shown.removeprefix('in ')}")
        if len(mailbox.sent) > mailbox.received:
            raise CollectiveMismatch(
                f"rank {route.source} sent what rank {route.to} never received: {mailbox.sent[mailbox.received][1]}"
            )
