# SPDX-License-Identifier: Apache-2.0
"""Writes reports: a file is written whole or not at all."""

import errno
import os
import sys
from pathlib import Path
from secrets import token_hex

from lossgate.base.errors import UsageError

_STANDARD_OUTPUT = Path("-")


def write_file(path: Path, text: str, *, option: str = "--output") -> None:
    """Writes text to a file, in UTF-8.

    The text goes to a new file in the same folder, which then replaces the old file, so nobody
    reads half of it. A path such as ``/dev/stdout`` or a pipe, which is no ordinary file, is
    written directly.

    Args:
        path: the file; ``-`` is standard output.
        option: the option that names the file, for errors.

    Raises:
        UsageError: if the file can't be written. The old file is still there then.
    """
    data = text.encode()
    try:
        if path == _STANDARD_OUTPUT:
            _print(data)
        elif path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"{option} {path}: can't be written: {reason}. Name a file in a folder that exists and can be written"
        ) from None


def _print(data: bytes) -> None:
    """Prints bytes, so that line ends and encoding are the same as in a file."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # standard output was replaced by a stream of text
        sys.stdout.write(data.decode())
    else:
        buffer.write(data)
        buffer.flush()


def _replace(path: Path, data: bytes) -> None:
    """Replaces a file by a new file with the same permissions."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not os.access(path, os.W_OK):  # a move would replace it all the same
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    new = path.with_name(f".lossgate-{token_hex(8)}")
    try:
        with new.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            new.chmod(path.stat().st_mode & 0o7777)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
