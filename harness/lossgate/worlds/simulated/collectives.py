# SPDX-License-Identifier: Apache-2.0
"""Collectives: a rank's call, checks of its arguments, the work, and the handle that it returns.

The work is done once all members have called. The functions that do it take the calls of all
members by group rank, read their inputs and write their outputs. ``root`` is a group rank. They
read every input before they write an output, because a tensor can be both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Complete = Callable[[Sequence["Call"]], None]
"""Does the work of a collective: reads the inputs of all members and writes their outputs.

It receives the members' calls in the order of their group ranks.
"""


def show(tensor: Tensor) -> str:
    """Returns dtype and shape of a tensor, such as ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def show_list(tensors: Sequence[Tensor]) -> str:
    """Returns dtypes and shapes of tensors, such as ``[float32[2], float32[3]]``."""
    return f"[{', '.join(map(show, tensors))}]"


@dataclass(eq=False)
class Call:
    """One member's call of a collective.

    Calls are compared by identity: two calls with equal arguments are still different calls.
    """

    rank: int
    """The caller's rank in the world, not in the group."""
    collective: str
    """The name of the ``torch.distributed`` function."""
    agreed: tuple[Any, ...]
    """The arguments in which all members must agree: reduce op, root, dtypes, shapes."""
    shown: str
    """The arguments as messages and the log show them."""
    inputs: list[Tensor]
    outputs: list[Tensor]
    splits: tuple[list[int], list[int]] = ([], [])
    """For an all_to_all: the sizes sent to each member, and the sizes received from each member."""
    number: int = 0
    """How many calls this member made on the group before this one in the same run."""
    site: str = ""
    """The line of the kernel that made the call."""
    done: bool = False
    """True once all members have called and the work is done."""

    @property
    def bytes(self) -> int:
        """The size of the inputs in bytes."""
        return sum(t.numel() * t.element_size() for t in self.inputs)

    def __str__(self) -> str:
        return f"{self.collective}({self.shown})"


Reduce = Callable[[Sequence[Tensor]], Tensor]
"""Reduces one tensor from each rank to a new one."""


def all_reduce(calls: Sequence[Call], reduce: Reduce) -> None:
    totals = [reduce(parts) for parts in zip(*(call.inputs for call in calls), strict=True)]
    for call in calls:
        _write(call.outputs, totals)


def reduce_to_root(calls: Sequence[Call], reduce: Reduce, root: int) -> None:
    _write(calls[root].outputs, [reduce([call.inputs[0] for call in calls])])


def broadcast(calls: Sequence[Call], root: int) -> None:
    source = [tensor.clone() for tensor in calls[root].inputs]
    for call in calls:
        _write(call.outputs, source)


def all_gather(calls: Sequence[Call]) -> None:
    sources = [call.inputs[0].clone() for call in calls]
    for call in calls:
        _write(call.outputs, sources)


def all_gather_into_tensor(calls: Sequence[Call]) -> None:
    gathered = torch.cat([call.inputs[0].reshape(-1) for call in calls])
    for call in calls:
        call.outputs[0].detach().copy_(gathered.view(call.outputs[0].shape))


def reduce_scatter(calls: Sequence[Call], reduce: Reduce) -> None:
    totals = [reduce([call.inputs[i] for call in calls]) for i in range(len(calls))]
    for call, total in zip(calls, totals, strict=True):
        _write(call.outputs, [total])


def reduce_scatter_tensor(calls: Sequence[Call], reduce: Reduce) -> None:
    total = reduce([call.inputs[0].reshape(len(calls), -1) for call in calls])
    for call, part in zip(calls, total, strict=True):
        call.outputs[0].detach().copy_(part.view(call.outputs[0].shape))


def all_to_all_single(calls: Sequence[Call]) -> None:
    parts = [call.inputs[0].clone().split(call.splits[0]) for call in calls]
    for i, call in enumerate(calls):
        call.outputs[0].detach().copy_(torch.cat([part[i] for part in parts]))


def all_to_all(calls: Sequence[Call]) -> None:
    sources = [[tensor.clone() for tensor in call.inputs] for call in calls]
    for i, call in enumerate(calls):
        _write(call.outputs, [source[i] for source in sources])


def scatter(calls: Sequence[Call], root: int) -> None:
    parts = [tensor.clone() for tensor in calls[root].inputs]
    for call, part in zip(calls, parts, strict=True):
        _write(call.outputs, [part])


def gather(calls: Sequence[Call], root: int) -> None:
    _write(calls[root].outputs, [call.inputs[0].clone() for call in calls])


def barrier(calls: Sequence[Call]) -> None:
    """Does nothing: the members have met."""


def _write(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)


# Checks of arguments. Each returns the mistake in words, or None. ``Call.agreed`` has the arguments
# that all members must pass alike. These functions check the others.


def slots_mismatch(slots: Sequence[Tensor], own: Tensor, group_rank: int, ranks: int) -> str | None:
    """Checks that all_gather has one output per rank, and the caller's own in its input's shape."""
    if len(slots) != ranks:
        return f"{len(slots)} outputs for {ranks} ranks"
    if slots[group_rank].shape != own.shape:
        return f"its own output slot is {show(slots[group_rank])}, but its input is {show(own)}"
    return None


def parts_mismatch(parts: Sequence[Tensor], ranks: int) -> str | None:
    """Checks that reduce_scatter has one input per rank."""
    if len(parts) != ranks:
        return f"{len(parts)} inputs for {ranks} ranks"
    return None


def size_mismatch(whole_name: str, whole: Tensor, part_name: str, part: Tensor, ranks: int) -> str | None:
    """Checks that the whole is as large as the parts of all ranks together, and has their dtype."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        return f"{whole_name} {show(whole)} is not {ranks} times {part_name} {show(part)}"
    return None


def cover_mismatch(source: Tensor, sent: list[int], output: Tensor, received: list[int]) -> str | None:
    """Checks that the splits of an all_to_all_single add up to the rows of input and output."""
    if sum(sent) != source.shape[0]:
        return f"input splits {sent} do not add up to the rows of the input {show(source)}"
    if sum(received) != output.shape[0]:
        return f"output splits {received} do not add up to the rows of the output {show(output)}"
    return None


def splits_mismatch(calls: Sequence[Call]) -> str | None:
    """Checks that each member sends what the receiver expects.

    Args:
        calls: the all_to_all calls of all members, by group rank.
    """
    for i, receiver in enumerate(calls):
        for j, sender in enumerate(calls):
            if sender.splits[0][i] != receiver.splits[1][j]:
                return (
                    f"rank {sender.rank} sends {sender.splits[0][i]} to rank {receiver.rank}, "
                    f"which expects {receiver.splits[1][j]}  [{sender.site}] [{receiver.site}]"
                )
    return None


# The handle

# Torch has no public name for this class. Its C++ code accepts no other.
_WorkBase: Any = dist._Work


class SimulatedWork(_WorkBase):  # type: ignore[misc]
    """The handle of a collective or of a message.

    Args:
        wait: blocks the rank until the result is there; None if it is there already.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        """Blocks the rank until the result is there. A further call does nothing.

        Args:
            timeout: ignored, because a deadlock is found at once.

        Returns:
            True.

        Raises:
            CollectiveMisuse: a tensor of the collective or message changed before this call.
            CollectiveMismatch: the message differs from the tensor in shape or dtype.
            Unwind: the run fails, here or on another rank.
        """
        if self._wait is not None:
            self._wait()
            self._wait = None
        return True

    def is_completed(self) -> bool:
        return self._wait is None

    def is_success(self) -> bool:
        return self._wait is None

    def get_future(self) -> torch.futures.Future[None]:
        """Waits for the result, then returns a future that is complete."""
        self.wait()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def all_of(works: Sequence[SimulatedWork]) -> SimulatedWork:
    """Returns one handle that waits for several handles."""

    def wait() -> None:
        for work in works:
            work.wait()

    return SimulatedWork(wait)
