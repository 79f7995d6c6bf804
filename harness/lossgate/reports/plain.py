# SPDX-License-Identifier: Apache-2.0
"""Text from evidence, made safe to show: names and messages may hold any character."""

import re
from collections.abc import Iterable

_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters; XML 1.0 forbids most of them
    r"\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # what reorders or hides text
    r"\ud800-\udfff\ufffe\uffff]"  # what UTF-8 and XML can't hold
)


def plain(text: str) -> str:
    """Returns text with an escape such as ``\\x1b`` for each character that can't be seen.

    Tabs and line feeds stay.
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str, limit: int | None = None) -> str:
    """Returns text as a single line.

    Args:
        limit: how many characters are kept (default: all). A cut text says so at its end.
    """
    line = " ".join(plain(text).split())
    return line if limit is None or len(line) <= limit else f"{line[:limit]}... (cut)"


def printable(text: str) -> str:
    """Returns text on one line, with an escape for each line break and what can't be seen."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_lines(texts: Iterable[str]) -> tuple[str, ...]:
    """Returns the lines of texts, each fit to be printed."""
    return tuple(printable(line) for text in texts for line in text.splitlines())
