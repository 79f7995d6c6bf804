# SPDX-License-Identifier: Apache-2.0
"""``lossgate diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lossgate.cli.app import Exit, app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lossgate.evidence.differences import CellChange


@app.command
def diff(before: Path, after: Path, /) -> int:
    """Show what got better, worse or vanished between two runs, and which cells lost power.

    Args:
        before: A file that verify --evidence wrote, or a folder of them (*.jsonl).
        after: The same for a later run, or for another machine.
    """
    from lossgate.evidence.differences import changes, read_side, surroundings
    from lossgate.reports.changed_cells import print_diff
    from lossgate.reports.console import make_console
    from lossgate.reports.evidence_table import troubles

    old, new = read_side(before), read_side(after)
    old_troubles = [(str(before), trouble) for trouble in troubles(old.gathered)]
    new_troubles = [(str(after), trouble) for trouble in troubles(new.gathered)]
    found = [*old_troubles, *new_troubles]
    changed = changes(old, new)
    in_both = old.cells.keys() & new.cells.keys()
    unchanged = len(in_both - {one.key for one in changed})
    print_diff(make_console(), changed, surroundings(old.gathered, new.gathered), found, unchanged)
    return _exit_code(changed, bool(found))


def _exit_code(changed: Sequence[CellChange], damaged: bool) -> Exit:
    from lossgate.evidence.differences import Change

    if any(one.change in (Change.DISAGREES, Change.BREAKS) for one in changed):
        return Exit.DISAGREE
    is_worse = damaged or any(one.change.is_worse for one in changed)
    return Exit.INCONCLUSIVE if is_worse else Exit.AGREE
