# SPDX-License-Identifier: Apache-2.0
"""Text from evidence, made safe to show: names and messages may hold any character."""

import re

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
