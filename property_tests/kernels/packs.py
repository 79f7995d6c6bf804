# SPDX-License-Identifier: Apache-2.0
"""What tests of packs share."""

from typing import Any

import torch
from torch import Tensor

FORMS = ("[T]", "[1, T]", "[T] without padding", "[1, T] without padding")
"""How frameworks hold the tokens of a pack: AReaL in one dim, NeMo-RL as a batch of one."""


def starts(lengths: list[int]) -> Tensor:
    """Returns where sequences start that lie end to end, and where the last one ends."""
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(rows: Tensor, lengths: list[int], padded: list[int], form: str, padding: float = 77) -> Tensor:
    """Returns rows as packed tokens of one of ``FORMS``, sequence by sequence.

    Padding is ``padding``, which no test may find in a result.
    """
    parts = [rows.new_zeros(0, *rows.shape[2:])]
    for i, (length, whole) in enumerate(zip(lengths, padded, strict=True)):
        entries = rows.new_full((whole if "without" not in form else length, *rows.shape[2:]), padding)
        entries[:length] = rows[i, :length]
        parts.append(entries)
    stream = torch.cat(parts)
    return stream[None] if form.startswith("[1") else stream


class FakeGroup:
    """A process group that knows its size and rank, and cannot communicate."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    @classmethod
    def all(cls, size: int) -> list[Any]:
        """Returns the group as each of its ranks sees it."""
        return [cls(size, rank) for rank in range(size)]

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank
