# SPDX-License-Identifier: Apache-2.0
"""Imports what a run verifies in a process that may die, before this one does.

A file may end the process that imports it, by a segmentation fault of a library, say. It costs no
time: the process goes on as the first in which cells run, and would have imported the file then.
"""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lossgate.declaration.loading import absolute_source
from lossgate.engine.child import Child, ChildDied
from lossgate.engine.jobs import ImportJob
from lossgate.errors import UsageError

_PATIENCE = 10.0
"""Seconds after which an import is said to take long."""
_ready = list[Child]()


@contextmanager
def imported_first(targets: Sequence[str], say: Callable[[str], None]) -> Generator[None]:
    """Imports targets in a process of their own, which ``take_child`` then returns.

    Args:
        targets: as for ``load_candidates``.
        say: is given a line if an import takes long.

    Raises:
        UsageError: if one ends the process. What else is wrong with it is left to this process,
            which finds the same.
    """
    child = Child(captured=True)
    _ready.append(child)
    try:
        for target in targets:
            _import(child, target, say)
        yield
    finally:
        if child in _ready:  # nobody has taken it
            _ready.remove(child)
            child.end()


def take_child() -> Child:
    """Returns a process in which cells can run: the one that has imported them, or a new one."""
    return _ready.pop() if _ready else Child(captured=True)


def _import(child: Child, target: str, say: Callable[[str], None]) -> None:
    location = target if target.endswith(".py") else target.rpartition(":")[0] or target
    child.start(ImportJob(absolute_source(f"{location}:").removesuffix(":")))
    if not child.connection.poll(_PATIENCE):
        say(f"{location} is still being imported after {_PATIENCE:.0f} s")
    try:
        with suppress(UsageError):
            child.result()
    except ChildDied as died:
        raise UsageError(
            f"{location}: can't be imported: the process that tried {_how(died, location)}; "
            f"see what python {location} does"
        ) from None


def _how(died: ChildDied, location: str) -> str:
    """Returns how a process died, and on which line of a file."""
    how, *frames = died.ended.splitlines()
    own = [frame for frame in frames if f'/{Path(location).name}"' in frame]
    line = re.search(r"line \d+", own[0]) if own else None
    return how.rstrip(",") + (f", on {line.group()}" if line else "")
