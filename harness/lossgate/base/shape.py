# SPDX-License-Identifier: Apache-2.0
"""The sizes of a large problem."""

import re
from dataclasses import dataclass

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown

_SEQUENCES = 8
"""Sequences of a problem whose size the user gives."""

MOST_ROWS = 2**24
"""The largest width or vocabulary of a problem. No model has as many."""
MOST_TOKENS = 2**17
"""The most tokens of a problem, with padding. Over more, a sum in float32 loses more digits than
the judge has been measured with."""


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
            UsageError: if it is none, has fewer tokens than sequences, or is larger than problems
                can be.
        """
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", size, re.ASCII)
        numbers = [int(number) for number in match.groups()] if match else [0]
        if min(numbers) < 1 or numbers[0] < _SEQUENCES:
            raise UsageError(
                f"size {shown(size)}: expected tokens, width of the hidden states and vocabulary, such as "
                f"4096x1024x32768, with {_SEQUENCES} tokens at least"
            )
        tokens, width, vocab = numbers
        if tokens > MOST_TOKENS or max(width, vocab) > MOST_ROWS:
            raise UsageError(
                f"size {shown(size)}: expected at most {MOST_TOKENS:,} tokens, and a width and a vocabulary of at most "
                f"{MOST_ROWS:,}"
            )
        return cls(tokens=tokens, vocab=vocab, width=width, sequences=_SEQUENCES)
