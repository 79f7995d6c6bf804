# SPDX-License-Identifier: Apache-2.0
"""Tests of the lines of keys in a TOML text."""

import tomllib
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from lossgate.gate.toml_lines import Keys, lines_of
from property_tests.meta.mutations import mutated

TEXT = r'''# a comment with [brackets] = and "quotes"
schema = 1   # line 2

[evidence]  # line 4
max_age = "3 # days"
"same_commit" = true
same_versions = [   # line 7
    "lossgate",  # ]
    # a comment
    "torch",
]

[[require]]  # line 13
candidates = ["a"]
note = """
[[require]]
candidates = \"""["b"]
"""""
min_problems = 1_000
raw = \'''
max_mde = 'no key'
\'''
max_mde = 1e-2  # line 23
[[require]]  # line 24
dates = [ 1979-05-27 07:32:00, 1979-05-27T00:32:00-07:00, 07:32:00 ]
points = [ { x = 1, y.z = {} },
           {x = [[], [2]]} ]
a.b . 'c d'."e\"f" = -inf
[require.sub.table]
key = ''
[[require.many]]
[[require.many]]
key = 2
[[require]]
[[require.many]]
key = 3
"\u00e9" = '\'
'''.replace("\\'''", "'''")


def keys_of(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yields the way to each value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from keys_of(item, (*path, key))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("schema",), 2),
        (("evidence",), 4),
        (("evidence", "max_age"), 5),
        (("evidence", "same_commit"), 6),
        (("evidence", "same_versions"), 7),
        (("evidence", "same_versions", 0), 8),
        (("evidence", "same_versions", 1), 10),
        (("require",), 13),
        (("require", 0), 13),
        (("require", 0, "candidates"), 14),
        (("require", 0, "min_problems"), 19),
        (("require", 0, "max_mde"), 23),
        (("require", 1), 24),
        (("require", 1, "points", 0), 26),
        (("require", 1, "points", 0, "y", "z"), 26),
        (("require", 1, "points", 1, "x", 1), 27),
        (("require", 1, "a", "b", "c d", 'e"f'), 28),
        (("require", 1, "sub"), 29),
        (("require", 1, "many", 1), 32),
        (("require", 1, "many", 1, "key"), 33),
        (("require", 2, "many", 0, "key"), 36),
        (("require", 2, "many", 0, "é"), 37),
    ],
)
def test_the_line_of_a_key(path: Keys, line: int, ending: str) -> None:
    assert lines_of(TEXT.replace("\n", ending))[path] == line


def test_every_value_has_a_line() -> None:
    assert set(lines_of(TEXT)) == set(keys_of(tomllib.loads(TEXT)))


def test_every_value_of_a_mutated_text_has_a_line() -> None:
    """If ``tomllib`` can read the text. In others the scanner stops somewhere."""
    read = 0
    for seed in range(2000):
        text = mutated(TEXT, Random(seed))
        lines = lines_of(text)
        try:
            values = tomllib.loads(text)
        except ValueError:
            continue
        read += 1
        assert set(lines) == set(keys_of(values)), text
        assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())
    assert read > 200


def test_a_key_of_many_parts_is_left_out() -> None:
    """The ways to its parts would take quadratic memory. So is what follows."""
    assert lines_of(f"a = 1\nb{'.b' * 3000} = 1\nc = 1") == {("a",): 1}
