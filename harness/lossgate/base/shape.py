# SPDX-License-Identifier: Apache-2.0
"""The sizes of a large problem."""

import re
from dataclasses import dataclass

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown

_SEQUENCES = 8
"""How many sequences a problem has if the user gives its size."""

MOST_ROWS = 2**24
"""The largest width or vocabulary of a problem. No model has as many."""
MOST_TOKENS = 2**17
"""The most tokens of a problem, with padding. A sum over more tokens in float32 loses more digits
than any on which the judge was measured."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a large problem. A problem that is made smaller gets usual sizes instead."""

    tokens: int
    vocab: int
    width: int
    sequences: int
    logit_std: float = 3.0

    @classmethod
    def of_size(cls, size: str) -> "Shape":
        """Reads a size that a user gives: tokens, width of the hidden states, and vocabulary.

        Raises:
            UsageError: if the text is no size, or the problem would have fewer tokens than
                sequences, or be larger than problems can be.
        """
        match = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", size, re.ASCII)
        tokens, width, vocab = map(int, match.groups()) if match else (0, 0, 0)
        if tokens < _SEQUENCES or width < 1 or vocab < 1:
            raise UsageError(
                f"size {shown(size)}: expected tokens, width of the hidden states and vocabulary, such as "
                f"4096x1024x32768, with {_SEQUENCES} tokens at least"
            )
        if tokens > MOST_TOKENS or max(width, vocab) > MOST_ROWS:
            raise UsageError(
                f"size {shown(size)}: expected at most {MOST_TOKENS:,} tokens, and a width and a vocabulary of at most "
                f"{MOST_ROWS:,}"
            )
        return cls(tokens=tokens, vocab=vocab, width=width, sequences=_SEQUENCES)
