# SPDX-License-Identifier: Apache-2.0
"""What was drawn and decided about problems is kept on disk, for other processes and runs.

It hangs on what a candidate declares, and never on its code. A key names all that it hangs on, and
an entry holds its whole key: one that is damaged, half-written or for something else is no entry.
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

from lossgate.errors import UsageError

FOLDER = "LOSSGATE_CACHE"
"""The environment variable that names the folder; empty for none."""
_MOST_BYTES = 256 * 2**20
"""The most that entries take together; the oldest give way."""
_WITHOUT = ("audit", "spec_check", "evidence", "gate", "reports", "pytest_plugin", "cli")
"""The rooms of lossgate on whose code no problem hangs, nor what it shows."""


T = TypeVar("T")


def kept(key: str, kind: type[T], make: Callable[[], T]) -> T:
    """Returns what is kept under a key. If nothing is, it is made, and kept if that can be.

    Args:
        key: names all that it hangs on, beside the code and versions of ``code``.
        kind: a type that msgspec can write and read.
        make: makes it anew.

    Raises:
        UsageError: if a file stands where the folder should.
    """
    key = f"{code()}\n{key}"
    path = _path(key)
    if path is None:
        return make()
    with suppress(OSError, msgspec.DecodeError, zlib.error):
        return _unpacked(path.read_bytes(), key, kind)
    made = make()
    with suppress(OSError):
        _write(path, _packed(key, made))
    return made


def _packed(key: str, made: object) -> bytes:
    """Returns the bytes of an entry: their digest, the length of the key, the key, what is kept."""
    own = key.encode()
    text = len(own).to_bytes(8, "big") + own + zlib.compress(msgspec.msgpack.encode(made))
    return sha256(text).digest() + text


def _unpacked(entry: bytes, key: str, kind: type[T]) -> T:
    digest, text, own = entry[:32], entry[32:], key.encode()
    if digest != sha256(text).digest() or not text.startswith(len(own).to_bytes(8, "big") + own):
        raise msgspec.DecodeError("it is damaged, or another's")
    return msgspec.msgpack.decode(zlib.decompress(text[8 + len(own) :]), type=kind)


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
def code() -> str:
    """Names the code on which decisions about problems hang, and the versions of what it uses."""
    found = sha256()
    for package in ("dense_losses", "lossgate"):
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        home = Path(spec.origin).parent
        for file in sorted(home.rglob("*.py")):
            name = file.relative_to(home)
            if package != "lossgate" or name.parts[0] not in _WITHOUT:
                found.update(f"{package} {name}\n".encode())
                found.update(file.read_bytes())
    versions = " ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "hypothesis"))
    return f"{found.hexdigest()[:16]} {versions} python {sys.version_info.major}.{sys.version_info.minor}"


def _path(key: str) -> Path | None:
    """Returns where an entry is kept; None if nothing is to be kept."""
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
    return found / sha256(key.encode()).hexdigest()[:32]


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
