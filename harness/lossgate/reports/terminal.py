# SPDX-License-Identifier: Apache-2.0
"""Shows a run: a progress bar or plain lines, then what disagrees, then the verdict table."""

from collections import Counter
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from lossgate.engine.cell import CellResult
from lossgate.engine.events import CellFinished, Event, RunStarted
from lossgate.reports.console import make_console
from lossgate.reports.failures import FailureFiles
from lossgate.reports.verdict_table import percent, share, summary, verdict_of, verdict_table

_DESCRIBED = 3
"""How many cells of a candidate are described in full. The others usually fail in the same way."""


class Terminal:
    """Shows a run on a console.

    Args:
        failures: knows the failure file of each cell.
        console: where to print (default: standard output).
    """

    def __init__(self, failures: FailureFiles, console: Console | None = None) -> None:
        self.console = console or make_console()
        self._failures = failures
        self._progress: Progress | None = None
        self._described: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(len(event.cells))
        elif isinstance(event, CellFinished):
            self._cell(event.result)
        else:
            self.close()
            self.console.print(verdict_table(event.results))
            self.console.print(summary(event.results))
            if event.stopped:
                self.console.print(f"[bold]stopped:[/] {escape(event.stopped)}", soft_wrap=True)

    def close(self) -> None:
        """Stops the progress bar, which leaves the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self, cells: int) -> None:
        if self.console.is_terminal:
            whole, cut = partial(Column, no_wrap=True), Column(overflow="ellipsis")
            columns = (
                BarColumn(bar_width=20),
                MofNCompleteColumn(table_column=whole()),
                TimeElapsedColumn(table_column=whole()),
                TextColumn("{task.description}", table_column=cut),
            )
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._progress.add_task("", total=cells)
            self._progress.start()
        else:
            self.console.print(f"{cells} cells")

    def _cell(self, result: CellResult) -> None:
        candidate = result.cell.candidate.name
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], advance=1, description=escape(str(result.cell)))
        else:
            self.console.print(_line(result), soft_wrap=True)
        if not result.passes:
            self._described[candidate] += 1
            if self._described[candidate] <= _DESCRIBED:
                for line in describe_cell(result, self._failures.replay(result)):
                    self._print_detail(line)

    def _print_detail(self, line: str) -> None:
        """Prints one line of ``describe_cell``, wrapped at words on a terminal.

        The replay command stays one line, because a line break in it would be copied, too. In a
        file every line stays whole, so that it can be searched.
        """
        if not self.console.is_terminal or line.startswith(_REPLAY):
            self.console.print(line, soft_wrap=True)
        else:
            text = line.lstrip(" ")
            self.console.print(Padding(Text.from_markup(text), (0, 0, 0, len(line) - len(text))))


_REPLAY = "  replay: "


def describe_cell(result: CellResult, replay: str | None) -> list[str]:
    """Describes in full why a cell does not agree.

    Args:
        result: a cell that is not AGREE.
        replay: the command that judges its failure again, if there is one.

    Returns:
        Lines in rich markup.
    """
    cell = result.cell
    lines = [f"{_marked(result)}  {escape(cell.candidate.name)}  {cell.dtype}  {cell.layout}"]
    lines += [f"  {escape(line)}" for reason in result.reasons for line in reason.splitlines()]
    if result.failure is not None:
        shrunk = f"  (after {result.shrink_calls} tries to make it smaller)" if result.shrink_calls else ""
        lines.append(f"  on: {escape(result.failure.problem.describe())}{shrunk}")
    if replay is not None:
        lines.append(f"{_REPLAY}{escape(replay)}")
    return lines


def _marked(result: CellResult) -> str:
    shown = verdict_of(result)
    return f"[{shown.style}]{escape(' '.join(filter(None, (shown.word, shown.note))))}[/]"


def _line(result: CellResult) -> str:
    cell = result.cell
    return (
        f"{_marked(result)}  {escape(cell.candidate.name)}  {cell.dtype}  {cell.layout}:  "
        f"{len(result.cases)} problems, {result.comparisons} comparisons, "
        f"at most {share(result.margin)} of a limit, detects {percent(result.mde)}  ({result.seconds:.1f} s)"
    )
