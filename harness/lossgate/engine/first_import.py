# SPDX-License-Identifier: Apache-2.0
"""Imports files of users in another process, before this one imports them.

A file may end the process that imports it, for example by a segmentation fault in a library. The
process goes on as the first in which cells run. It tells of the candidates that it found, so that
this process imports the file itself only if it must.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.declaration.loading import absolute_source
from lossgate.declaration.modules import StandIn
from lossgate.engine.child import Child, ChildDied
from lossgate.engine.elsewhere import stand_in
from lossgate.engine.jobs import ImportJob

_PATIENCE = 10.0
"""Seconds after which the user is told that an import takes long."""
_ready = list[Child]()
"""The process that has imported files, until cells take it. There is at most one."""


def import_first(location: str, say: Callable[[str], None]) -> StandIn | None:
    """Imports a file or module in another process. ``take_child`` then returns the process.

    Args:
        location: as for ``load_module``.
        say: is called with a line if the import takes long.

    Returns:
        What stands in for the location; None if this process must import it.

    Raises:
        UsageError: if the import ends the process. Other errors are not raised here, because this
            process meets them when it imports the file itself.
    """
    if not _ready:
        _ready.append(Child(captured=True))
    child = _ready[-1]
    child.start(ImportJob(absolute_source(f"{location}:").removesuffix(":")))
    if not child.connection.poll(_PATIENCE):
        say(f"{location} is still being imported after {_PATIENCE:.0f} s")
    try:
        with suppress(UsageError):
            told = child.result()
            return None if told is None else stand_in(told, child.printed)
    except ChildDied as died:
        raise UsageError(
            f"{location}: can't be imported: the process that tried {_how(died, location)}; "
            f"see what {_by_hand(location)} does"
        ) from None
    return None


def take_child() -> Child:
    """Returns a process in which cells can run: the one that imported files, or else a new one."""
    return _ready.pop() if _ready else Child(captured=True)


def end_ready() -> None:
    """Ends the process that imported files, if cells have not taken it."""
    while _ready:
        _ready.pop().end()


def _by_hand(location: str) -> str:
    """Returns the command that imports a file or module."""
    return f"python {location}" if location.endswith(".py") else f"python -c 'import {location}'"


def _how(died: ChildDied, location: str) -> str:
    """Returns how a process died, in words, with the line of the file if it is known."""
    how, *frames = died.ended.splitlines()
    name = Path(location).name if location.endswith(".py") else f"{location.rpartition('.')[2]}.py"
    in_file = [frame for frame in frames if f'/{name}"' in frame]
    line = re.search(r"line \d+", in_file[0]) if in_file else None
    ended = how.rstrip(",")
    return f"{ended}, on {line.group()}" if line else ended
