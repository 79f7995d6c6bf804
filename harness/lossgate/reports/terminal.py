# SPDX-License-Identifier: Apache-2.0
"""Shows a run: a progress bar or plain lines, then what disagrees, then the verdict table."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from enum import IntEnum
from functools import partial

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from lossgate.base.spelling import counted
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.cell_record import CellRecord
from lossgate.engine.events import CellAgrees, CellFinished, CellSkipped, CellStarted, Event, RunFinished, RunStarted
from lossgate.reports.console import make_console, print_whole, printable
from lossgate.reports.describe import describe, escaped, heading, print_detail, print_remarks, size_lines
from lossgate.reports.failures import FailureFiles
from lossgate.reports.shown_verdict import ShownVerdict, percent, share
from lossgate.reports.stories import Stories
from lossgate.reports.unfit_specs import unfit_specs
from lossgate.reports.verdict_table import coloured_summary, summary, verdict_table

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


class Volume(IntEnum):
    """How much of a run is shown."""

    QUIET = 0
    """The cells that do not pass, and the summary."""
    NORMAL = 1
    """Also the verdict table. Without a terminal, also a line for each cell."""
    VERBOSE = 2
    """All cells, each failing cell in full, the output of kernels, and the cost."""


_PRINTED = 10
"""The most printed lines of a candidate that are shown."""


class Terminal:
    """Shows a run on a console.

    Args:
        failures: knows the failure file of each cell.
        console: where to print (default: standard output).
        volume: how much is shown.
    """

    def __init__(self, failures: FailureFiles, console: Console | None = None, volume: Volume = Volume.NORMAL) -> None:
        self.console = console or make_console()
        self._failures, self._volume = failures, volume
        self._progress: CellProgress | None = None
        self._stories = Stories(whole=volume is Volume.VERBOSE)
        self._printed = _PrintedLines(whole=volume is Volume.VERBOSE)
        self._skipped: list[CellSkipped] = []
        self._numbers_only = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._numbers_only = event.settings.numbers_only
            self._start(len(event.cells))
            for remark in event.remarks:
                self.console.print(escape(remark), soft_wrap=True)
        elif isinstance(event, CellStarted):
            if self._progress is not None:
                self._progress.started(event.cell)
        elif isinstance(event, CellAgrees):
            if self._progress is not None:  # a log has only verdicts, and this is none yet
                self._progress.agrees(event.cell)
        elif isinstance(event, CellFinished):
            if self._progress is not None:
                self._progress.finished(event.result.cell)
            self._cell(event.result)
        elif isinstance(event, CellSkipped):
            if self._progress is not None:
                self._progress.finished(event.cell)
            self._skipped.append(event)
        else:
            self._finish(event)

    def close(self) -> None:
        """Stops the progress bar, which leaves the terminal as it was."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def _start(self, cells: int) -> None:
        if self._volume is Volume.QUIET:
            return
        if self.console.is_interactive:
            self._progress = CellProgress(self.console, cells)
        else:
            self.console.print(counted(cells, "cell"))

    def _cell(self, result: CellResult) -> None:
        cell = replace(result.record, replay=self._failures.replay(result))
        story = [*self._stories.of(cell, listed=self._lists_all)]
        if cell.passes:  # what is left to say of the candidate before
            self._print(story)
        if cell.passes and self._lists_all:
            print_detail(self.console, _line(cell))
        if self._volume is not Volume.QUIET:
            where = f"{cell.candidate}  {cell.dtype}  {cell.layout}"
            remarks = [f" {result.run.remark}"] if result.run.remark else []
            self._print(f"  {escaped(where)} {escaped(line)}" for line in [*size_lines(cell), *remarks])
        if not cell.passes:
            self._print(story)
        if self._volume is not Volume.QUIET or not cell.passes:
            self._print(map(escape, self._printed.new(cell.candidate, result.printed)))

    @property
    def _lists_all(self) -> bool:
        """Whether every cell has a line. A log has them; on a terminal there is a progress bar."""
        is_log = not self.console.is_interactive and self._volume is Volume.NORMAL
        return is_log or self._volume is Volume.VERBOSE

    def _finish(self, event: RunFinished) -> None:
        self.close()
        self._print(self._stories.end())
        cells = [result.record for result in event.results]
        if self._volume is not Volume.QUIET and cells:
            print_whole(self.console, verdict_table(cells, glossary=self._volume is Volume.VERBOSE))
            print_remarks(self.console, cells)
        self._print(map(escaped, unfit_specs(event.results)))
        self._print(_skipped_lines(self._skipped))
        if event.stopped:
            self.console.print(f"[bold]stopped:[/] {escape(event.stopped)}", soft_wrap=True)
        asked = sum(cell.mistakes_seconds for cell in cells) if self._volume is Volume.VERBOSE else 0.0
        last = coloured_summary(summary(cells, event.seconds, asked=asked, numbers_only=self._numbers_only))
        self.console.print(last, soft_wrap=not self.console.is_terminal)

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            print_detail(self.console, line)


class _PrintedLines:
    """Remembers the lines that each candidate has printed, so that each line is shown once.

    Args:
        whole: whether all lines are shown, however many there are.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._seen: dict[str, set[str]] = {}

    def new(self, candidate: str, text: str) -> list[str]:
        """Returns a heading and the lines that a candidate has not printed before; nothing if there
        are no such lines.

        Args:
            candidate: the name of the candidate.
            text: everything that it printed in a cell.
        """
        printed = Counter(line for line in text.splitlines() if line.strip())
        seen = self._seen.setdefault(candidate, set())
        new = [line for line in printed if line not in seen]
        room = len(new) if self._whole else max(_PRINTED - len(seen), 0)
        seen.update(new)
        shown, more = new[:room], len(new) - room
        if not shown:
            return []
        lines = [f"  {candidate} printed {counted(printed.total(), 'line')}; each is shown once:"]
        lines += [f"    {printable(line)}" for line in shown]
        if more > 0:
            lines.append(f"    and {counted(more, 'other line')}; -v shows all")
        return lines


def describe_cell(result: CellResult, replay: str | None, *, whole: bool = False) -> list[str]:
    """Describes why a cell does not agree, in lines of plain text.

    The first line is the verdict, the cause and what to do, because it is all that pytest's summary
    shows.

    Args:
        result: a cell that is not AGREE.
        replay: the command that judges its failure again, if there is one.
        whole: whether statistics are shown.
    """
    cell = replace(result.record, replay=replay)
    lines = [heading(cell), *describe(cell, whole=whole)]
    return [printable(f"{ShownVerdict.of(cell)}: {cell.first_told}"), *(Text.from_markup(line).plain for line in lines)]


def _skipped_lines(skipped: Sequence[CellSkipped]) -> list[str]:
    """Returns a line for each candidate that was given up, with the number of its skipped cells."""
    counts = Counter((one.cell.candidate.name, one.reason.partition("\n")[0]) for one in skipped)
    return [
        f"{escape(name)}: {counted(count, 'more cell')} not tried, since all before ended alike: {escape(reason)}"
        for (name, reason), count in counts.items()
    ]


def _line(cell: CellRecord) -> str:
    if cell.expected:  # its statistics are those of a disagreement
        beside = cell.known_failure.beside if cell.known_failure is not None else ""
        return f"{heading(cell)}:  as expected{beside and f'; {escape(beside)}'}  ({cell.seconds:.1f} s)"
    vocab = f", V={cell.vocab:,}" if cell.vocab is not None else ""
    tried = f", up to T={cell.tokens:,}{vocab}" if cell.problems else ""
    return (
        f"{heading(cell)}:  {counted(cell.problems, 'problem')}, {counted(cell.comparisons, 'comparison')}, "
        f"at most {share(cell.margin)} of a limit, detects {percent(cell.mde)}{tried}  ({cell.seconds:.1f} s)"
    )
