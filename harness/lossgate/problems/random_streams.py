# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are the same on every machine.

The raw output of numpy's Philox generator is specified for good (``torch.randn`` and ``Generator.normal`` may change
with version and vector width). Everything made of it here uses exactly rounded operations alone, no libm.
"""

from math import sqrt
from zlib import crc32

import numpy as np
import torch
from torch import Tensor


class Bits:
    """Streams of random tensors for one seed. A stream is known by its name, so that one more breaks no other."""

    def __init__(self, *seed: int | str) -> None:
        self._seed = crc32(repr(seed).encode())

    def _raw(self, stream: str, count: int) -> np.ndarray:
        return np.random.Philox(key=np.array([self._seed, crc32(stream.encode())], dtype=np.uint64)).random_raw(count)

    def uniform(self, stream: str, *shape: int) -> Tensor:
        """Float64 in [0, 1)."""
        raw = self._raw(stream, _count(shape)) >> np.uint64(11)
        return torch.from_numpy(raw.astype(np.float64) * 2.0**-53).reshape(shape)

    def normal(self, stream: str, *shape: int) -> Tensor:
        """Float64, bell-shaped with mean 0 and standard deviation 1: the sum of four uniform numbers, within +-3.5.

        Heavy tails are for the problem to draw, as spread and spikes, not left to chance.
        """
        halves = self._raw(stream, _count(shape)).view(np.uint16).reshape(-1, 4)
        centred = halves.astype(np.int64).sum(axis=1) - 2 * (2**16 - 1)
        return torch.from_numpy(centred.astype(np.float64) * (sqrt(3.0) / 2**16)).reshape(shape)

    def integers(self, stream: str, below: int, *shape: int) -> Tensor:
        """Int64 in [0, below)."""
        raw = self._raw(stream, _count(shape)) >> np.uint64(32)
        return torch.from_numpy(((raw * np.uint64(below)) >> np.uint64(32)).astype(np.int64)).reshape(shape)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
