# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that a call uses, from the operations that torch dispatches.

It counts the tensors that operations return. It works on a CPU and reads no allocator's statistics,
so numbers are the same everywhere. It can't see what a single operation makes and drops inside.
"""

import weakref
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from lossgate.numerics.torch_operations import DispatchMode, base_name
from lossgate.observe.traffic import Collective, brought

Phase = Literal["forward", "backward"]
_ON_HOST = (
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
)
"""Operations whose result, or its size, depends on values: the host waits there for a GPU."""
_INDEXES = ("index", "index_put", "_index_put_impl")
"""Operations for which the host waits only if an index is a mask."""


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that an operation made."""

    elements: int
    """The number of elements in its storage. A number that is expanded to a large view has one."""
    bytes: int
    """The size of its storage."""
    shown: str
    """Its dtype and shape, such as ``float32[16, 512]``."""
    operation: str
    phase: Phase


class MemoryWatch(DispatchMode):
    """Watches the tensors that are made while it is on, and which of them are alive.

    It is on in the thread that enters it, and in backward. It sees the collectives that torch
    dispatches. Torch does not dispatch those of the simulated world, which has a log of its own.
    """

    def __init__(self, inputs: Iterable[Tensor] = (), axes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Prepares to watch.

        Args:
            inputs: tensors that do not count. Their views do not count either.
            axes: labels of process groups, by the names of the groups.
        """
        super().__init__()
        self._axes = axes
        self._inputs = [tensor.untyped_storage() for tensor in inputs]
        """Kept alive, so that no other storage gets their address."""
        self._known = {storage._cdata for storage in self._inputs}
        self._alive: dict[int, int] = {}
        self.alive = 0
        """Bytes of the tensors that were made and are alive."""
        self.phase: Phase = "forward"
        self.peak: dict[Phase, int] = {"forward": 0, "backward": 0}
        """Most bytes alive at a time."""
        self.largest: dict[Phase, MadeTensor | None] = {"forward": None, "backward": None}
        """The tensor with the most elements."""
        self.sizes: set[int] = set()
        """The numbers of elements of the tensors that operations returned, views included."""
        self.host_waits: list[str] = []
        """Operations that need a value on the host, in order."""
        self.collectives: list[Collective] = []
        """The collectives that torch dispatched, in order."""

    @contextmanager
    def during(self, phase: Phase) -> Generator[None]:
        """Watches a phase."""
        self.phase = phase
        with self:
            yield

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at a time, in any phase."""
        return max(self.peak.values())

    @property
    def largest_bytes(self) -> int:
        """Bytes of the tensor with the most elements, in any phase."""
        made = [largest for largest in self.largest.values() if largest is not None]
        return max(made, key=lambda tensor: tensor.elements).bytes if made else 0

    def alive_without(self, tensors: Collection[Tensor]) -> int:
        """Returns the bytes of tensors that were made and are alive, except the given tensors."""
        left_out = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(size for key, size in self._alive.items() if key not in left_out)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):  # such as DTensor: its inner operations come next
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if _needs_values(func, args):
            self.host_waits.append(str(func))
        self.collectives.extend(brought(func, args, self._axes))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.sizes.add(leaf.numel())
                self._see(leaf, func)
        return result

    def _see(self, tensor: Tensor, operation: Any) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or self._alive.get(key) == size:
            return
        if key not in self._alive:
            weakref.finalize(storage, self._drop, key)
        self.alive += size - self._alive.get(key, 0)
        self._alive[key] = size
        self.peak[self.phase] = max(self.peak[self.phase], self.alive)
        largest, elements = self.largest[self.phase], size // tensor.element_size()
        if largest is None or elements > largest.elements:
            shown = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            self.largest[self.phase] = MadeTensor(elements, size, shown, str(operation), self.phase)

    def _drop(self, key: int) -> None:
        self.alive -= self._alive.pop(key, 0)


def _needs_values(operation: Any, args: Any) -> bool:
    """Returns whether the host needs values of tensors for an operation."""
    name = base_name(operation)
    if name in _INDEXES:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name in _ON_HOST
