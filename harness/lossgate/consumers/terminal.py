# SPDX-License-Identifier: Apache-2.0
"""What people see: a progress bar on a terminal or plain lines in CI, then what disagrees, then the verdict table."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lossgate.console import make_console
from lossgate.engine.cell import CellResult, Verdict
from lossgate.engine.run import CellFinished, Event, RunStarted
from lossgate.reports.failure_files import FailureFiles

_STYLES = {Verdict.AGREE: "green", Verdict.DISAGREE: "bold red", Verdict.INCONCLUSIVE: "yellow"}
_SHOWN = 3
"""Cells of one candidate that are told in full; the others fail alike as a rule."""


class Terminal:
    """Shows a run. ``failures`` knows the failure files."""

    def __init__(self, failures: FailureFiles, console: Console | None = None) -> None:
        self.console = console or make_console()
        self._failures = failures
        self._progress: Progress | None = None
        self._told: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(len(event.cells))
        elif isinstance(event, CellFinished):
            self._cell(event.result)
        else:
            self.close()
            self.console.print(verdict_table(event.results))
            self.console.print(summary(event.results))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self, cells: int) -> None:
        if self.console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._progress.add_task("", total=cells)
            self._progress.start()
        else:
            self.console.print(f"{cells} cells")

    def _cell(self, result: CellResult) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], advance=1, description=str(result.cell))
        else:
            self.console.print(_line(result), soft_wrap=True)
        if result.verdict is not Verdict.AGREE and not result.expected:
            self._told[result.cell.candidate.name] += 1
            if self._told[result.cell.candidate.name] <= _SHOWN:
                for line in tell(result, self._failures.of(result.cell)):
                    self.console.print(line, soft_wrap=True)


def tell(result: CellResult, failure: Path | None) -> list[str]:
    """A cell that is not agreed, in full; rich markup."""
    cell = result.cell
    lines = [f"{_marked(result)}  {cell.candidate.name}  {cell.dtype}  {cell.layout}"]
    lines += [f"  {escape(line)}" for reason in result.reasons for line in reason.splitlines()]
    if result.failure is not None:
        shrunk = f"  (after {result.shrink_calls} tries to make it smaller)" if result.shrink_calls else ""
        lines.append(f"  on: {escape(result.failure.problem.describe())}{shrunk}")
    if failure is not None:
        lines.append(f"  replay: lossgate replay {escape(str(failure))}")
    return lines


def _marked(result: CellResult) -> str:
    word = (
        f"{result.verdict} (known: {result.cell.candidate.finding.name})"
        if result.expected and result.cell.candidate.finding
        else result.verdict
    )
    return f"[{'cyan' if result.expected else _STYLES[result.verdict]}]{word}[/]"


def _line(result: CellResult) -> str:
    cell = result.cell
    return (
        f"{_marked(result)}  {cell.candidate.name}  {cell.dtype}  {cell.layout}:  {len(result.examined)} problems, "
        f"{result.comparisons} comparisons, at most {_share(result.margin)} of a limit, sees {_percent(result.mde)}  ({result.seconds:.1f} s)"
    )


def verdict_table(results: Sequence[CellResult]) -> Table:
    """A row for each candidate and dtype, over all of its layouts."""
    table = Table(title="Verdicts", title_justify="left", box=SIMPLE)
    for heading in (
        "candidate",
        "dtype",
        "layouts",
        "problems",
        "comparisons",
        "of limit",
        "sees",
        "verdict",
        "good for",
    ):
        right = heading in ("problems", "comparisons", "of limit", "sees")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading not in ("good for", "verdict"))
    for (candidate, dtype), group in groupby(results, key=lambda r: (r.cell.candidate, r.cell.dtype)):
        rows = list(group)
        verdicts = Counter(_marked(r) for r in rows)
        layouts = (
            str(rows[0].cell.layout)
            if len(rows) == 1
            else f"{len(rows)}, up to {max(r.cell.layout.ranks for r in rows)} ranks"
        )
        table.add_row(
            candidate.name,
            dtype,
            layouts,
            str(sum(len(r.examined) for r in rows)),
            str(sum(r.comparisons for r in rows)),
            _share(max(r.margin for r in rows)),
            _percent(max(r.mde for r in rows)),
            "\n".join(f"{count} x {word}" if len(verdicts) > 1 else word for word, count in verdicts.items()),
            escape(candidate.good_for),
        )
    table.caption = (
        "of limit: the largest statistic, over 1 disagrees. "
        "sees: the least error in an output's scale that each cell's pool would have seen."
    )
    table.caption_justify = "left"
    return table


def summary(results: Sequence[CellResult]) -> str:
    counts = Counter("known disagreement" if r.expected else str(r.verdict) for r in results)
    told = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
    return f"{len(results)} cells: {told}; {sum(r.seconds for r in results):.0f} s"


def _share(margin: float) -> str:
    return f"{margin:.2f}" if margin < 10 else f"{margin:.2g}"


def _percent(mde: float) -> str:
    """A pool that is off by more than itself sees nothing."""
    return "nothing" if mde > 1 else f"{mde:.2g}" if mde < 1e-4 else f"{100 * mde:.2g}%"
