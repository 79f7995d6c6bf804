# SPDX-License-Identifier: Apache-2.0
"""What a kernel makes: the sizes of its tensors, and the bytes that live at the same time."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Of everything that is made while it is on.

    Does not see what a single operator of PyTorch makes and drops inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()
        """Elements of each tensor."""
        self.largest = 0
        """Bytes of the largest tensor."""
        self.peak = 0
        """Most bytes alive at a time, what autograd saves among them."""
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.sizes.add(leaf.numel())
                self.largest = max(self.largest, leaf.nbytes)
                self._watch(leaf)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._alive.values()))
