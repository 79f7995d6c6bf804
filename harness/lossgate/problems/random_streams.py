# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are the same on every machine.

The raw output of numpy's Philox generator is specified for good, while ``torch.randn`` and
``Generator.normal`` may change with version and vector width. What is made of it here uses exactly
rounded operations only, no libm.
"""

from math import prod, sqrt
from zlib import crc32

import numpy as np
import torch
from torch import Tensor


class RandomStreams:
    """Named streams of random tensors for one seed.

    A new stream leaves the numbers of all others as they are.
    """

    def __init__(self, *seed: int | str) -> None:
        self._seed = crc32(repr(seed).encode())

    def _raw(self, stream: str, count: int) -> np.ndarray:
        key = np.array([self._seed, crc32(stream.encode())], dtype=np.uint64)
        return np.random.Philox(key=key).random_raw(count)

    def uniform(self, stream: str, *shape: int) -> Tensor:
        """Returns float64 numbers in [0, 1)."""
        raw = self._raw(stream, prod(shape)) >> np.uint64(11)
        return torch.from_numpy(raw.astype(np.float64) * 2.0**-53).reshape(shape)

    def normal(self, stream: str, *shape: int) -> Tensor:
        """Returns float64 numbers of mean 0 and standard deviation 1, each the sum of four uniform
        ones, within +-3.5.

        Heavy tails are for the problem to draw, as ``logit_std`` and ``outliers``, not left to
        chance.
        """
        halves = self._raw(stream, prod(shape)).view(np.uint16).reshape(-1, 4)
        centred = halves.astype(np.int64).sum(axis=1) - 2 * (2**16 - 1)
        return torch.from_numpy(centred.astype(np.float64) * (sqrt(3.0) / 2**16)).reshape(shape)

    def integers(self, stream: str, below: int, *shape: int) -> Tensor:
        """Returns int64 numbers in [0, below)."""
        raw = self._raw(stream, prod(shape)) >> np.uint64(32)
        return torch.from_numpy(((raw * np.uint64(below)) >> np.uint64(32)).astype(np.int64)).reshape(shape)
