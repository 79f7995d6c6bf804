# SPDX-License-Identifier: Apache-2.0
"""What git says of the files that are verified."""

import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path


def git(*arguments: str, folder: Path | None = None) -> str | None:
    """Returns what git prints, or None if it fails: there is no checkout, say."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def digest_of_source(source: str) -> str | None:
    """Returns the SHA-256 of the file that declares a candidate, if it is a file."""
    file = _file_of(source)
    return None if file is None else _digest(file)


def is_source_modified(source: str) -> bool | None:
    """Returns whether the file that declares a candidate differs from the commit, or is not in it;
    None if git can't say.
    """
    file = _file_of(source)
    return None if file is None else _is_modified(file)


def _file_of(source: str) -> Path | None:
    location, _, _ = source.rpartition(":")
    return Path(location).resolve() if location.endswith(".py") else None


@cache
def _digest(file: Path) -> str | None:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


@cache
def _is_modified(file: Path) -> bool | None:
    changed = git("status", "--porcelain", "--ignored", "--", file.name, folder=file.parent)
    return None if changed is None else bool(changed)
