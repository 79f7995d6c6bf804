# SPDX-License-Identifier: Apache-2.0
"""Which code a process has loaded. Ranks on several machines may have files of different days."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from zlib import crc32

_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Packages here are distinguished by their versions."""


def loaded_code() -> dict[str, int]:
    """Returns a checksum of each loaded module that is not installed, such as a kernel's own."""
    return _checksums(len(sys.modules))


@cache
def _checksums(modules: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if name != "__main__" and file and file.endswith(".py") and not file.startswith(_INSTALLED):
            found[name] = _checksum(file)
    return found


@cache
def _checksum(file: str) -> int:
    path = Path(file)
    return crc32(path.read_bytes()) if path.is_file() else 0
