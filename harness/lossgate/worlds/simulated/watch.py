# SPDX-License-Identifier: Apache-2.0
"""Tells whether a kernel wrote to tensors that a call in flight owns."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lossgate.numerics.dispatched import unobserved


class Watch:
    """Remembers tensors as they are now, in order to tell later which were written to.

    It compares bits, so NaN equals NaN, and -0 differs from 0. A write can leave the bits as they
    are: NaN + 1 is NaN. Torch's version counter shows such a write too. It counts for all views of
    one memory, so it is asked only for a tensor that spans its whole memory. A write through
    ``.data`` or NumPy is not counted, and is seen by its bits alone.

    Args:
        tensors: what to watch. It is read, not kept from being read.
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
    """Returns the number of writes to a tensor, or None if writes to other memory count as well."""
    spans = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor._version if spans and not tensor.is_inference() else None
