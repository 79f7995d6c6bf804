# SPDX-License-Identifier: Apache-2.0
"""The memory that a call uses, seen by each operation that torch dispatches.

It counts what operations make: on a CPU and without an allocator's statistics, so that it is the
same everywhere. What a single operation of torch makes and drops inside is not seen.
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

from lossgate.numerics.dispatched import DispatchMode, base_name
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
"""Operations whose result, or its size, hangs on values: a host waits there for its device."""
_INDEXES = ("index", "index_put", "_index_put_impl")
"""They do if an index is a mask."""


@dataclass(frozen=True)
class MadeTensor:
    """A tensor that an operation made."""

    elements: int
    """Of its storage: an expanded view of one number has one."""
    bytes: int
    shown: str
    """Its dtype and shape, such as ``float32[16, 512]``."""
    operation: str
    phase: Phase


class MemoryWatch(DispatchMode):
    """Watches what is made while it is on, and what of that lives.

    It is on in the thread that enters it, and in backward. Collectives are seen where torch
    dispatches them, which the simulated world does not: it has a log of its own.
    """

    def __init__(self, inputs: Iterable[Tensor] = (), axes: Mapping[str, str] = MappingProxyType({})) -> None:
        """Prepares to watch.

        Args:
            inputs: tensors that are not counted, nor are views of them.
            axes: labels of process groups, by their names.
        """
        super().__init__()
        self._axes = axes
        self._inputs = [tensor.untyped_storage() for tensor in inputs]  # kept, so that no other takes their place
        self._known = {storage._cdata for storage in self._inputs}
        self._alive: dict[int, int] = {}
        self.alive = 0
        """Bytes of what was made and lives."""
        self.phase: Phase = "forward"
        self.peak: dict[Phase, int] = {"forward": 0, "backward": 0}
        """Most bytes alive at a time."""
        self.largest: dict[Phase, MadeTensor | None] = {"forward": None, "backward": None}
        """The tensor with the most elements."""
        self.sizes: set[int] = set()
        """Elements of each tensor that an operation returned, views among them."""
        self.host_waits: list[str] = []
        """Operations that need a value on the host, in order."""
        self.collectives: list[Collective] = []
        """Those that torch dispatched, in order."""

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
        made = [one for one in self.largest.values() if one is not None]
        return max(made, key=lambda one: one.elements).bytes if made else 0

    def alive_without(self, tensors: Collection[Tensor]) -> int:
        """Returns the bytes of what was made and lives, without these tensors."""
        left_out = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(size for key, size in self._alive.items() if key not in left_out)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):  # as a DTensor: its own operations come next
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
    if name not in _INDEXES:
        return name in _ON_HOST
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
