# SPDX-License-Identifier: Apache-2.0
"""The state of the sources that a run verified: commit, digests, and changes since the commit."""

import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path


def git(*arguments: str, folder: Path | None = None) -> str | None:
    """Returns the output of git, or None if it fails, as outside a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def file_of(source: str) -> Path | None:
    """Returns the file that declares a candidate; None if a module does."""
    location, _, _ = source.rpartition(":")
    return Path(location).resolve() if location.endswith(".py") else None


@cache
def digest_of(file: Path) -> str | None:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


@cache
def is_modified(file: Path) -> bool | None:
    """Returns whether a file differs from its commit or is not in it; None if git can't say."""
    changed = git("status", "--porcelain", "--ignored", "--", file.name, folder=file.parent)
    return None if changed is None else bool(changed)
