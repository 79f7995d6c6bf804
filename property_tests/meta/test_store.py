# SPDX-License-Identifier: Apache-2.0
"""What is kept on disk is read again whole, or made anew."""

import ast
import multiprocessing
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lossgate.adequacy import store
from lossgate.base.errors import UsageError
from property_tests.meta.command_line import Lossgate
from property_tests.meta.test_rooms import FLOORS, HARNESS, imported


class Found(msgspec.Struct):
    """Something that takes long to find."""

    number: float
    names: list[str]


FOUND = Found(float("inf"), ["temperature ignored"] * 1000)


@pytest.fixture(autouse=True)
def along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of what comes along: nothing."""
    store.code_of_shipped.cache_clear()
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "along")
    yield tmp_path / "along"
    store.code_of_shipped.cache_clear()


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.ANEW, "")
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "store"))
    return tmp_path / "store"


def made(key: str = "a deck", **given: Any) -> bool:
    """Returns whether what belongs to a key had to be made."""
    calls = list[int]()

    def make() -> Found:
        calls.append(1)
        return FOUND

    assert store.kept(key, Found, make, **given) == FOUND
    return bool(calls)


def test_it_is_made_once(kept_in: Path) -> None:
    assert [made(), made(), made("another deck"), made(), made("another deck")] == [True, False, True, False, False]
    assert len(list(kept_in.iterdir())) == 2


def _flipped(at: int, entry: bytes) -> bytes:
    own = bytearray(entry)
    own[at] ^= 1
    return bytes(own)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda entry: b"",
    "half": lambda entry: entry[: len(entry) // 2],
    "a byte less": lambda entry: entry[:-1],
    "a byte more": lambda entry: entry + b"\0",
    "text": lambda entry: b"not found",
    **{
        f"byte {at}": lambda entry, at=at: entry[:at] + bytes([entry[at] ^ 1]) + entry[at + 1 :]
        for at in (0, 35, 60, -1)
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_anew(kept_in: Path, damage: str) -> None:
    made()
    (entry,) = kept_in.iterdir()
    entry.write_bytes(DAMAGE[damage](entry.read_bytes()))
    assert [made(), made()] == [True, False]


def test_the_entry_of_another_key_is_not_believed(kept_in: Path) -> None:
    made()
    (one,) = kept_in.iterdir()
    made("another deck")
    (other,) = set(kept_in.iterdir()) - {one}
    shutil.copy(one, other)
    assert made("another deck")


def test_an_entry_of_another_kind_is_made_anew(kept_in: Path) -> None:
    store.kept("a deck", list[int], lambda: [1])
    assert made()


@pytest.mark.parametrize("other", ["code", "versions"])
def test_other_code_and_other_versions_find_nothing(kept_in: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    made()
    monkeypatch.setattr(store, other, lambda *given: "of tomorrow")
    assert made()


def ship(along: Path, code: str | None = None) -> None:
    """Has something else than ``FOUND`` come along."""
    along.mkdir()
    content = zlib.compress(msgspec.msgpack.encode(Found(1, ["along"])))
    (along / store.name_of("a deck")).write_bytes(store.packed("a deck", content))
    (along / store.CODE).write_text(f"{code or store.code('decks')}\n")


def test_what_comes_along_is_believed_of_the_same_code_whatever_the_versions(
    kept_in: Path, along: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(along)
    monkeypatch.setattr(store, "versions", lambda: "of tomorrow")
    assert store.kept("a deck", Found, lambda: FOUND) == Found(1, ["along"])
    assert not kept_in.exists()
    assert made("another deck")


@pytest.mark.parametrize("wrong", ["code", "no code", "damaged", "another's", "of all code", "unfit", "told to"])
def test_what_comes_along_is_not_believed(
    kept_in: Path, along: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    ship(along, "of yesterday" if wrong == "code" else None)
    entry = along / store.name_of("a deck")
    if wrong == "no code":
        (along / store.CODE).unlink()
    elif wrong == "damaged":
        entry.write_bytes(entry.read_bytes()[:-1])
    elif wrong == "another's":
        entry.write_bytes(store.packed("another deck", store.unpacked(entry.read_bytes())[1]))
    elif wrong == "told to":
        monkeypatch.setenv(store.ANEW, "yes")
    given: dict[str, Any] = {"of all code": {"of": "all"}, "unfit": {"fits": lambda own: own == FOUND}}.get(wrong, {})
    assert [made(**given), made(**given)] == [True, False]


def test_what_a_user_keeps_is_made_anew_if_it_does_not_fit(kept_in: Path) -> None:
    made()
    assert store.kept("a deck", Found, lambda: Found(2, []), fits=lambda own: own.number < 3) == Found(2, [])
    assert store.kept("a deck", Found, lambda: FOUND) == Found(2, [])


def test_the_code_is_that_of_all_rooms_but_those_above_the_engine() -> None:
    """On properties, too, hangs what is drawn: for their own mistakes."""
    rooms = [room for floor in FLOORS for room in floor]
    assert {name.removesuffix(".py") for name in store.WITHOUT["all"]} == {*rooms[rooms.index("engine") + 1 :]}


def test_what_a_deck_says_hangs_on_no_code_that_is_left_out() -> None:
    """But for what a rank and a world are, and where a call came from, which errors name."""
    seen, left = set[str](), ["adequacy.choice", *(f"losses.{path.stem}" for path in (HARNESS / "losses").glob("*.py"))]
    while left:
        name = left.pop()
        files = [HARNESS / f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py")]
        if name not in seen and any(file.exists() for file in files):
            seen.add(name)
            source = next(file for file in files if file.exists()).read_text()
            left += imported(source)
            for node in ast.walk(ast.parse(source)):  # what is imported of a room may be a file of it
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lossgate."):
                    left += [f"{node.module}.{alias.name}".removeprefix("lossgate.") for alias in node.names]
    without = {name.removesuffix(".py") for name in store.WITHOUT["decks"]}
    assert {name for name in seen if name.partition(".")[0] in without} == {"worlds.base", "worlds.call_sites"}


def test_an_empty_variable_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [made(), made()] == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_without_the_variable_the_folder_is_that_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert [made(), made()] == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["lossgate"]


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(store.FOLDER)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert [made(), made()] == [True, True]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "file/store"))
    assert [made(), made()] == [True, True]


def test_a_file_in_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "file"))
    with pytest.raises(UsageError, match="it is a file; expected a folder, or nothing for none"):
        made()


def test_the_oldest_give_way(kept_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("old")
    (old,) = kept_in.iterdir()
    os.utime(old, (0, 0))
    made("new")
    monkeypatch.setattr(store, "_MOST_BYTES", 2.5 * old.stat().st_size)
    made("newest")
    assert not old.exists()
    assert [made("new"), made("newest"), made("old")] == [False, False, True]


def _many(number: int) -> list[Any]:
    return [store.kept(f"deck {turn % 3}", Found, lambda: FOUND) for turn in range(50)]


def test_many_processes_write_and_read_at_once(kept_in: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(_many, range(4))
    assert found == [[FOUND] * 50] * 4
    assert not list(kept_in.glob(".part-*"))
    assert not any(made(f"deck {number}") for number in range(3))


@pytest.mark.slow
def test_a_run_keeps_what_it_finds_unless_it_is_told_not_to(kept_in: Path, lossgate: Lossgate) -> None:
    command = ("verify", "kernels.py:right", "--layout", "single", "--dtype", "float32", "--examples", "2")
    lossgate(*command, "--no-cache")
    assert not kept_in.exists()
    os.environ[store.FOLDER] = str(kept_in)  # as in another process
    lossgate(*command)
    assert list(kept_in.iterdir())
