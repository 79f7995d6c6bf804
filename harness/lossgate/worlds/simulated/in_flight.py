# SPDX-License-Identifier: Apache-2.0
"""Asynchronous calls: detects a kernel that touches a tensor before ``wait()``.

A kernel that reads an output too early reads NaN. A kernel that writes to an input or an output too
early gets an error. In a real library the results of both would depend on timing.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lossgate.numerics.torch_operations import unobserved
from lossgate.worlds.base import CollectiveMisuse
from lossgate.worlds.simulated.collectives import Call, Complete, show
from lossgate.worlds.simulated.rendezvous import Rendezvous


class Watch:
    """Remembers tensors as they are now, in order to tell later which were written to.

    It compares bits, so NaN equals NaN, and -0 differs from 0. It also compares torch's version
    counters, because a write can leave the bits as they are: NaN + 1 is NaN. All views of one
    memory share a counter, so it is used only for a tensor that spans its whole memory. Torch does
    not count writes through ``.data`` or NumPy; only their bits show them.

    Args:
        tensors: the tensors to watch.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        once = {id(tensor): tensor for tensor in tensors if tensor.numel()}.values()
        with unobserved():
            self._seen = [(tensor, _bits(tensor).clone(), _version(tensor)) for tensor in once]

    def written(self) -> Tensor | None:
        """Returns the first of the tensors that was written to, or None."""
        with unobserved():
            for tensor, bits, version in self._seen:
                if _version(tensor) != version or not torch.equal(_bits(tensor), bits):
                    return tensor
        return None


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _version(tensor: Tensor) -> int | None:
    """Returns torch's count of writes to a tensor; None if it has none for this tensor alone."""
    spans = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor._version if spans and not tensor.is_inference() else None


def post_in_flight(rendezvous: Rendezvous, call: Call, complete: Complete) -> Callable[[], None]:
    """Adds a member's call without waiting for the others.

    The collective works on copies of the inputs, taken now. The outputs are poisoned until the
    wait, which writes the results into them.

    Args:
        rendezvous: the meeting point of the group.
        call: the call; its inputs and outputs are replaced by copies.
        complete: does the work, given the calls of all members.

    Returns:
        The wait, a function. It blocks until the call is complete, and does nothing when called
        again. It raises ``CollectiveMisuse`` if the rank wrote to an input or an output meanwhile.

    Raises:
        CollectiveMismatch: the call disagrees with one that another member has already made.
        Unwind: the run has failed elsewhere.
    """
    communicator, inputs, outputs = rendezvous.communicator, call.inputs, call.outputs
    _copy_tensors(call)
    with torch.no_grad(), unobserved():
        for tensor in outputs:
            poison(tensor.detach())
    # Made after poisoning: an input can lie in an output, as in an all_gather from a slice of it.
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


def _copy_tensors(call: Call) -> None:
    """Replaces the tensors of a call by copies. A tensor that is input and output stays one."""
    with unobserved():
        copies = {id(tensor): tensor.detach().clone() for tensor in [*call.inputs, *call.outputs]}
    call.inputs = [copies[id(tensor)] for tensor in call.inputs]
    call.outputs = [copies[id(tensor)] for tensor in call.outputs]


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
