# SPDX-License-Identifier: Apache-2.0
"""Imports files of users in a process that may die, before this one does.

A file may end the process that imports it, by a segmentation fault of a library, say. A run loses
no time by it: the process goes on as the first in which cells run, and would have imported the file
then.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lossgate.base.errors import UsageError
from lossgate.declaration.loading import absolute_source
from lossgate.engine.child import Child, ChildDied
from lossgate.engine.jobs import ImportJob

_PATIENCE = 10.0
"""Seconds after which an import is said to take long."""
_ready = list[Child]()


def import_first(location: str, say: Callable[[str], None]) -> None:
    """Imports a file or module in a process of its own, which ``take_child`` then returns.

    Args:
        location: as for ``load_module``.
        say: is given a line if it takes long.

    Raises:
        UsageError: if that ends the process. What else is wrong with it is left to this process,
            which finds the same.
    """
    if not _ready:
        _ready.append(Child(captured=True))
    child = _ready[-1]
    child.start(ImportJob(absolute_source(f"{location}:").removesuffix(":")))
    if not child.connection.poll(_PATIENCE):
        say(f"{location} is still being imported after {_PATIENCE:.0f} s")
    try:
        with suppress(UsageError):
            child.result()
    except ChildDied as died:
        raise UsageError(
            f"{location}: can't be imported: the process that tried {_how(died, location)}; "
            f"see what {_by_hand(location)} does"
        ) from None


def take_child() -> Child:
    """Returns a process in which cells can run: the one that has imported them, or a new one."""
    return _ready.pop() if _ready else Child(captured=True)


def end_ready() -> None:
    """Ends the process that nobody has taken, if there is one."""
    while _ready:
        _ready.pop().end()


def _by_hand(location: str) -> str:
    return f"python {location}" if location.endswith(".py") else f"python -c 'import {location}'"


def _how(died: ChildDied, location: str) -> str:
    """Returns how a process died, and on which line of a file."""
    how, *frames = died.ended.splitlines()
    name = Path(location).name if location.endswith(".py") else f"{location.rpartition('.')[2]}.py"
    own = [frame for frame in frames if f'/{name}"' in frame]
    line = re.search(r"line \d+", own[0]) if own else None
    return how.rstrip(",") + (f", on {line.group()}" if line else "")
