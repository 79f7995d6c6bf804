# SPDX-License-Identifier: Apache-2.0
"""Shows a run: a progress bar or plain lines, then what disagrees, then the verdict table."""

from collections import Counter
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from lossgate.counted import counted
from lossgate.engine.cell import CellResult
from lossgate.engine.events import CellFinished, Event, RunStarted
from lossgate.reports.causes import CausesSoFar
from lossgate.reports.console import make_console, print_whole
from lossgate.reports.describe import DESCRIBED, describe, marked, print_detail, print_remarks
from lossgate.reports.failures import FailureFiles
from lossgate.reports.shown_cell import ShownCell, of_result
from lossgate.reports.verdict_table import percent, share, summary, verdict_table


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
        self._causes_so_far = CausesSoFar()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(len(event.cells))
        elif isinstance(event, CellFinished):
            self._cell(event.result)
        else:
            self.close()
            cells = [of_result(result) for result in event.results]
            print_whole(self.console, verdict_table(cells))
            print_remarks(self.console, cells)
            self.console.print(summary(cells))
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
            self.console.print(counted(cells, "cell"))

    def _cell(self, result: CellResult) -> None:
        candidate, shown = result.cell.candidate.name, of_result(result)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], advance=1, description=escape(str(result.cell)))
        else:
            self.console.print(_line(shown), soft_wrap=True)
        for line in shown.at_sizes:
            where = f"{escape(candidate)}  {result.cell.dtype}  {result.cell.layout}"
            print_detail(self.console, f"  {where} {escape(line)}")
        if not result.passes:
            self._described[candidate] += 1
            if self._described[candidate] <= DESCRIBED:
                for line in describe_cell(result, self._failures.replay(result), self._causes_so_far):
                    print_detail(self.console, line)


def describe_cell(result: CellResult, replay: str | None, so_far: CausesSoFar | None = None) -> list[str]:
    """Describes in full why a cell does not agree, in lines of rich markup.

    Args:
        result: a cell that is not AGREE.
        replay: the command that judges its failure again, if there is one.
        so_far: knows the causes that were shown of other cells.
    """
    return describe(of_result(result, replay), so_far)


def _line(cell: ShownCell) -> str:
    seen = f", detects {percent(cell.mde)}" if cell.verdict.word != "DISAGREE" else ""  # it has detected an error
    tried = f", {cell.largest}" if cell.largest else ""
    return (
        f"{marked(cell)}  {escape(cell.candidate)}  {cell.dtype}  {cell.layout}:  "
        f"{counted(cell.problems, 'problem')}, {counted(cell.comparisons, 'comparison')}, "
        f"at most {share(cell.margin)} of a limit{seen}{tried}  ({cell.seconds:.1f} s)"
    )
