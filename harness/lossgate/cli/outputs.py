# SPDX-License-Identifier: Apache-2.0
"""The files that a command writes beside what it prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lossgate.cli.app import Exit, say

Text = Callable[[], str]
"""Makes the text of a file."""


def check_outputs(files: Mapping[str, Path | None], inputs: Sequence[Path]) -> None:
    """Refuses to write over what is read, or over another file that is written.

    Raises:
        UsageError: if one would be lost.
    """
    from lossgate.base.errors import UsageError

    taken = {_real(file): str(file) for file in inputs}
    for name, file in files.items():
        if file is None or (file.exists() and not file.is_file()):  # such as /dev/stdout
            continue
        if (real := _real(file)) in taken:
            raise UsageError(f"--{name} {file}: it would write over {taken[real]}; name another file")
        taken[real] = f"--{name} {file}"


def _real(file: Path) -> str:
    return os.path.realpath(file)


def write_outputs(outputs: Mapping[str, tuple[Path, Text]], code: Exit) -> Exit:
    """Writes files. One that cannot be written is reported, and the others are written all the
    same.

    Args:
        outputs: the file that each option names, and its text.
        code: the exit code of the command so far.

    Returns:
        The exit code of the command: that of wrong use if a file could not be written and nothing
        disagrees.
    """
    from lossgate.base.errors import UsageError
    from lossgate.reports.written import write_file

    for name, (file, make) in outputs.items():
        try:
            write_file(file, make(), option=f"--{name}")
        except UsageError as error:
            say(str(error))
            code = code if code is Exit.DISAGREE else Exit.USAGE
    return code
