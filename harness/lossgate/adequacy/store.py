# SPDX-License-Identifier: Apache-2.0
"""What was drawn and decided about problems is kept on disk, for other processes and runs.

It hangs on what a candidate declares, and never on its code. A key names all that it hangs on, and
an entry holds its whole key: one that is damaged, half-written or for something else is no entry.

For what is declared most, decks and what they show come with lossgate, in ``SHIPPED``:
``ci/ship_decks.py`` makes them. They are believed as long as the code is that which made them.
Versions do not matter: the tensors of a problem are the same in all, and a problem that is kept
need not be drawn again.
"""

import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import msgspec

from lossgate.base.errors import UsageError

FOLDER = "LOSSGATE_CACHE"
"""The environment variable that names the folder; empty for none."""
ANEW = "LOSSGATE_ANEW"
"""The environment variable that, if it is not empty, has nothing believed that comes along."""
SHIPPED = Path(__file__).with_name("shipped")
"""What comes along: an entry in each file, and ``CODE``."""
CODE = "code"
"""The file beside the entries that names the code which made them; see ``code``."""
_MOST_BYTES = 256 * 2**20
"""The most that entries take together; the oldest give way."""
_ABOVE = ("adapters", "findings", "spec_check", "evidence", "gate", "reports", "pytest_plugin", "cli", "__main__.py")
_BESIDE = (
    *("__init__.py", "dense_candidates.py", "inputs.py", "options.py", "tour.py"),
    *("base/fork_server.py", "base/launch.py", "base/own_process.py"),
)
WITHOUT = {
    "decks": (*_ABOVE, *_BESIDE, "worlds", "strategies.py", "observe", "properties", "diagnosis", "engine"),
    "all": _ABOVE,
}
"""The rooms of lossgate on whose code it does not hang what is in a deck and which known mistakes
that shows (``decks``), nor what is drawn for an aim of a property (``all``)."""


T = TypeVar("T")


def kept(
    key: str, kind: type[T], make: Callable[[], T], *, of: str = "decks", fits: Callable[[T], bool] = lambda _: True
) -> T:
    """Returns what is kept under a key. If nothing is, it is made, and kept if that can be.

    Args:
        key: names all that it hangs on, beside code and versions.
        kind: a type that msgspec can write and read.
        make: makes it anew.
        of: on what code it hangs; see ``WITHOUT``. What hangs on all code does not come along.
        fits: whether what is kept fits to what else is there; otherwise it is made anew.

    Raises:
        UsageError: if a file stands where the folder should.
    """
    if of == "decks" and not os.environ.get(ANEW) and code_of_shipped() == code(of):
        with suppress(OSError, ValueError, zlib.error):
            return _read(SHIPPED / name_of(key), key, kind, fits)
    key = "\n".join((of, code(of), versions(), key))
    folder = _folder()
    if folder is None:
        return make()
    path = folder / name_of(key)
    with suppress(OSError, ValueError, zlib.error):  # msgspec's errors are ValueErrors
        return _read(path, key, kind, fits)
    made = make()
    with suppress(OSError):
        _write(path, packed(key, zlib.compress(msgspec.msgpack.encode(made), 9)))
    return made


def name_of(key: str) -> str:
    """Returns the name of the file for a key."""
    return sha256(key.encode()).hexdigest()[:32]


@cache
def code_of_shipped() -> str:
    """Names the code that made what comes along, as ``code`` does."""
    try:
        return (SHIPPED / CODE).read_text().strip()
    except OSError:
        return ""


def packed(key: str, content: bytes) -> bytes:
    """Returns an entry: its digest, the length of the key, the key, what is kept, compressed."""
    own = key.encode()
    text = len(own).to_bytes(8, "big") + own + content
    return sha256(text).digest() + text


def unpacked(entry: bytes) -> tuple[str, bytes]:
    """Returns the key of an entry and what is kept, compressed.

    Raises:
        ValueError: if it is damaged.
    """
    digest, text = entry[:32], entry[32:]
    if digest != sha256(text).digest():
        raise ValueError("the entry is damaged")
    start = 8 + int.from_bytes(text[:8], "big")
    return text[8:start].decode(), text[start:]


def _read(path: Path, key: str, kind: type[T], fits: Callable[[T], bool]) -> T:
    own, content = unpacked(path.read_bytes())
    if own != key:
        raise ValueError("it is another's")
    found = msgspec.msgpack.decode(zlib.decompress(content), type=kind)
    if not fits(found):
        raise ValueError("it is not of what else is there")
    return found


def _write(path: Path, entry: bytes) -> None:
    """Writes an entry whole or not at all, whoever else does the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".part-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(entry)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    _make_room(path.parent)


@cache
def code(of: str) -> str:
    """Names the code on which what is kept hangs.

    Args:
        of: which; see ``WITHOUT``.
    """
    found = sha256()
    for package in ("dense_losses", "lossgate"):
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        home = Path(spec.origin).parent
        for file in sorted(home.rglob("*.py")):
            name = file.relative_to(home)
            if package != "lossgate" or not {name.parts[0], name.as_posix()} & set(WITHOUT[of]):
                found.update(f"{package} {name.as_posix()}\n".encode())
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


@cache
def versions() -> str:
    """Names the versions with which problems are drawn and asked."""
    own = " ".join(f"{name} {version(name)}" for name in ("lossgate", "torch", "numpy", "hypothesis"))
    return f"{own} python {sys.version_info.major}.{sys.version_info.minor}"


def _folder() -> Path | None:
    """Returns the folder of the user; None if nothing is to be kept."""
    named = os.environ.get(FOLDER)
    if named == "":
        return None
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user of a container may have none
        return None
    found = Path(named) if named is not None else Path(home, "lossgate")
    if found.exists() and not found.is_dir():
        raise UsageError(f"{found}, where {FOLDER} keeps decks: it is a file; expected a folder, or nothing for none")
    return found


def _make_room(folder: Path) -> None:
    """Removes the oldest entries if all together are too large. Another process may do the same."""
    entries = list[tuple[float, int, Path]]()
    for path in folder.iterdir():
        with suppress(OSError):
            status = path.stat()
            entries.append((status.st_mtime, status.st_size, path))
    left = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if left <= _MOST_BYTES:
            return
        with suppress(OSError):
            path.unlink()
        left -= size
