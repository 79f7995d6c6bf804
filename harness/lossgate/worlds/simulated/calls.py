# SPDX-License-Identifier: Apache-2.0
"""One rank's side of a collective, and how messages and the log show calls and tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
