# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls: detects a kernel that touches a tensor before ``wait()``.

A kernel that reads an output too early reads NaN. A kernel that writes to an input or an output too
early gets an error. In a real library its results would depend on timing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lossgate.numerics.dispatched import unobserved
from lossgate.worlds.base import CollectiveMisuse
from lossgate.worlds.simulated.calls import Call, Complete, show
from lossgate.worlds.simulated.rendezvous import Rendezvous
from lossgate.worlds.simulated.watch import Watch


def post_in_flight(rendezvous: Rendezvous, call: Call, complete: Complete) -> Callable[[], None]:
    """Adds a member's call without waiting for the others.

    The collective works on copies of the inputs, taken now. The outputs are poisoned until the
    wait, which writes the results into them.

    Args:
        rendezvous: the meeting point of the group.
        call: the call; its inputs and outputs are replaced by copies.
        complete: does the work, given the calls of all members.

    Returns:
        The wait. It blocks until the call is complete, and does nothing when called again. It
        raises ``CollectiveMisuse`` if the rank wrote to an input or an output meanwhile.

    Raises:
        CollectiveMismatch: the call disagrees with one that another member has already made.
        Unwind: the run has failed elsewhere.
    """
    communicator, inputs, outputs = rendezvous.communicator, call.inputs, call.outputs
    with unobserved():
        snapshots = {id(t): t.detach().clone() for t in [*inputs, *outputs]}
    call.inputs = [snapshots[id(t)] for t in inputs]
    call.outputs = [snapshots[id(t)] for t in outputs]  # a tensor that is input and output stays one tensor
    with torch.no_grad(), unobserved():
        for tensor in outputs:
            poison(tensor.detach())
    # From now on: an input can lie in an output, as in an all_gather from a slice of its output.
    watch = Watch([*outputs, *inputs])
    communicator.in_flight.append(call)
    rendezvous.post(call, complete)

    def finish() -> None:
        if call not in communicator.in_flight:
            return
        if (written := watch.written()) is not None:
            role = "output" if any(written is tensor for tensor in outputs) else "input"
            raise CollectiveMisuse(
                f"rank {call.rank}: the {role} {show(written)} of {call} #{call.number} on {rendezvous} "
                f"was changed before wait(); call wait() first, or use another tensor  [{call.site}]"
            )
        rendezvous.wait(call)
        communicator.in_flight.remove(call)
        with torch.no_grad(), unobserved():
            for tensor, result in zip(outputs, call.outputs, strict=True):
                tensor.detach().copy_(result)

    return finish


def poison(tensor: Tensor) -> None:
    """Fills a tensor with NaN, or with the extreme value of its dtype if it has no NaN.

    The extreme value is the least integer, or the greatest of an unsigned dtype, or True.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        info = torch.iinfo(tensor.dtype)
        tensor.fill_(info.min or info.max)
