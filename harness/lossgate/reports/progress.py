# SPDX-License-Identifier: Apache-2.0
"""The progress bar: how many cells are done, the time that is left, and what runs now."""

from datetime import timedelta
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from lossgate.engine.cell import Cell

_NO_BREAK = "\N{NO-BREAK SPACE}"
_LEAST = 3
"""The remaining time is estimated once so many cells are done."""


class CellProgress:
    """Shows how far a run is, on a terminal.

    Args:
        console: the terminal.
        cells: how many cells the run has.
    """

    def __init__(self, console: Console, cells: int) -> None:
        whole, cut = partial(Column, no_wrap=True), Column(overflow="ellipsis")
        columns = (
            BarColumn(bar_width=20, complete_style="cyan", finished_style="cyan"),
            MofNCompleteColumn(table_column=whole()),
            _Times(table_column=whole()),
            TextColumn("{task.description}", table_column=cut),
        )
        self._running: dict[str, str] = {}
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task("starting", total=cells)
        self._bar.start()

    def started(self, cell: Cell) -> None:
        self._running[str(cell)] = str(cell)
        self._show()

    def agrees(self, cell: Cell) -> None:
        """Shows that a cell agrees with the reference. Its other properties are still to come."""
        self._running[str(cell)] = f"{cell} agrees so far"
        self._show()

    def finished(self, cell: Cell) -> None:
        self._running.pop(str(cell), None)
        self._bar.advance(self._task)
        self._show()

    def close(self) -> None:
        """Removes the bar, which leaves the terminal as it was."""
        self._bar.stop()

    def _show(self) -> None:
        first, *others = self._running.values() or [""]
        more = f" and {len(others)} more" if others else ""
        words = escape(f"{first}{more}").replace(" ", _NO_BREAK)
        self._bar.update(self._task, description=words, refresh=True)


class _Times(ProgressColumn):
    """Shows the time so far, and the time left if further cells take as long as those before."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        text = str(timedelta(seconds=int(elapsed)))
        if task.completed >= _LEAST and task.total is not None:
            left = elapsed / task.completed * (task.total - task.completed)
            text += f", about {timedelta(seconds=int(left))} left"
        return Text(text)
