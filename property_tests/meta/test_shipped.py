# SPDX-License-Identifier: Apache-2.0
"""What comes with lossgate of decks is of today's code, whole, and what is made anew."""

import zlib
from math import isclose
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ci.ship_decks import declared, make
from lossgate.adequacy import deck, store

ENTRIES = sorted(path for path in store.SHIPPED.iterdir() if path.name != store.CODE)
FIRST = ("nll", "logits", "float32")


def test_it_is_of_this_code() -> None:
    assert store.code_of_shipped() == store.code("decks"), "run python ci/ship_decks.py, and commit what it writes"


def test_each_entry_is_whole_and_of_its_key() -> None:
    keys = [store.unpacked(path.read_bytes())[0] for path in ENTRIES]
    assert [path.name for path in ENTRIES] == [store.name_of(key) for key in keys]
    assert len(keys) > len(list(declared()))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("given", [FIRST, *(one for one in declared() if one != FIRST)], ids=str)
def test_made_anew_it_is_the_same(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.ANEW, "yes")
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    monkeypatch.setattr(deck, "_DECKS", type(deck._DECKS)())
    make(*given)
    made = [store.unpacked(path.read_bytes()) for path in tmp_path.iterdir()]
    assert made
    for key, content in made:
        own = key.split("\n", maxsplit=3)[-1]  # without code and versions
        there, shipped = store.unpacked((store.SHIPPED / store.name_of(own)).read_bytes())
        assert there == own
        assert _alike(_content(content), _content(shipped))


def _content(packed: bytes) -> Any:
    return msgspec.msgpack.decode(zlib.decompress(packed))


def _alike(made: Any, shipped: Any) -> bool:
    """Returns whether two say the same. Another processor may give numbers other last bits."""
    if isinstance(made, dict) and isinstance(shipped, dict):
        return made.keys() == shipped.keys() and all(_alike(made[name], shipped[name]) for name in made)
    if isinstance(made, list) and isinstance(shipped, list):
        return len(made) == len(shipped) and all(map(_alike, made, shipped))
    if isinstance(made, float) and isinstance(shipped, float):
        return isclose(made, shipped, rel_tol=1e-3)
    return made == shipped


@pytest.mark.parametrize("other", [{"a": [2, 0.5]}, {"a": [1, 0.5], "b": 1}, {"a": [1]}, [1], {"a": [1, 0.51]}])
def test_what_differs_is_not_alike(other: Any) -> None:
    assert _alike({"a": [1, 0.5]}, {"a": [1, 0.5 + 1e-12]})
    assert not _alike({"a": [1, 0.5]}, other)
