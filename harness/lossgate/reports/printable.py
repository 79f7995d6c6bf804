# SPDX-License-Identifier: Apache-2.0
"""Makes text of a file fit to be printed: names in evidence may hold anything."""


def printable(text: str) -> str:
    """Returns text on one line, with control characters and line breaks as their escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
