# SPDX-License-Identifier: Apache-2.0
"""Patterns of cells: what a user types to name one or many."""

from fnmatch import fnmatchcase

from lossgate.evidence.records import CellKey


def matches(pattern: str, key: CellKey) -> bool:
    """Returns whether a pattern names a cell, by all of its name or by that of its candidate.

    ``*`` stands for any text and ``?`` for any character. Brackets stand for themselves, because
    names of cells have them: ``nll_*[*tp=2*]``.
    """
    literal = pattern.replace("[", "[[]")
    return any(fnmatchcase(name, literal) for name in (str(key), key.candidate))
