# SPDX-License-Identifier: Apache-2.0
"""Says in words how many of something there are, and which."""

from collections.abc import Sequence


def counted(number: int, what: str) -> str:
    """Returns a number and a noun, with the plural's "s" where it belongs."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def in_a_row(words: Sequence[str]) -> str:
    """Returns words with commas, and "and" before the last; "" for none."""
    *first, last = words or ("",)
    return f"{', '.join(first)} and {last}" if first else last
