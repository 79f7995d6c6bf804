# SPDX-License-Identifier: Apache-2.0
"""The sizes of a large problem."""

import re
from dataclasses import dataclass

from lossgate.errors import UsageError
from lossgate.spelling import shown

_SEQUENCES = 8
"""Sequences of a problem whose size the user gives."""


@dataclass(frozen=True)
class Shape:
    """Sizes that a large problem has. When it is made smaller, it gets usual ones."""

    tokens: int
    vocab: int
    width: int
    sequences: int
    logit_std: float = 3.0

    @classmethod
    def of_size(cls, size: str) -> "Shape":
        """Reads a size that a user gives: tokens, width of the hidden states, and vocabulary.

        Raises:
            UsageError: if it is none, or has fewer tokens than sequences.
        """
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", size, re.ASCII)
        numbers = [int(number) for number in match.groups()] if match else [0]
        if min(numbers) < 1 or numbers[0] < _SEQUENCES:
            raise UsageError(
                f"size {shown(size)}: expected tokens, width of the hidden states and vocabulary, such as "
                f"4096x1024x32768, with {_SEQUENCES} tokens at least"
            )
        tokens, width, vocab = numbers
        return cls(tokens=tokens, vocab=vocab, width=width, sequences=_SEQUENCES)
