# SPDX-License-Identifier: Apache-2.0
"""Draws random numbers that are the same on every machine.

The raw output of numpy's Philox generator is specified for good. ``torch.randn`` and
``Generator.normal`` may change with the version and with the width of vector instructions. Numbers
are made from the raw output by exactly rounded operations only, without libm.
"""

from math import prod, sqrt
from zlib import crc32

import numpy as np
import torch
from torch import Tensor


class RandomStreams:
    """Named streams of random tensors for one seed.

    A new stream does not change the numbers of other streams.
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
        """Returns float64 numbers of mean 0 and standard deviation 1.

        Each is the sum of four uniform numbers, within +-3.5. Heavy tails are not left to chance: a
        problem asks for them by ``logit_std`` and ``outliers``.
        """
        halves = self._raw(stream, prod(shape)).view(np.uint16).reshape(-1, 4)
        centred = halves.astype(np.int64).sum(axis=1) - 2 * (2**16 - 1)
        return torch.from_numpy(centred.astype(np.float64) * (sqrt(3.0) / 2**16)).reshape(shape)

    def integers(self, stream: str, below: int, *shape: int) -> Tensor:
        """Returns int64 numbers in [0, below)."""
        raw = self._raw(stream, prod(shape)) >> np.uint64(32)
        return torch.from_numpy(((raw * np.uint64(below)) >> np.uint64(32)).astype(np.int64)).reshape(shape)
