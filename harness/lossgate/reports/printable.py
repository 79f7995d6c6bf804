# SPDX-License-Identifier: Apache-2.0
"""Makes text of a file fit to be printed in a line: names in evidence may hold anything."""

from lossgate.reports.plain import plain


def printable(text: str) -> str:
    """Returns text on one line, with an escape for each line break and what can't be seen."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")
