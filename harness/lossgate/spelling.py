# SPDX-License-Identifier: Apache-2.0
"""Help for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: object, known: Iterable[str]) -> str:
    """Returns how a message ends: the nearest spelling, if any, and what was expected."""
    choices = list(known)
    close = get_close_matches(str(name), choices, n=1)
    expected = f"expected one of {', '.join(choices)}" if choices else "there are none"
    return f"did you mean {close[0]!r}? ({expected})" if close else expected
