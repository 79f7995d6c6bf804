# SPDX-License-Identifier: Apache-2.0
"""Shows everything that evidence has on one cell."""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lossgate.base.spelling import counted
from lossgate.engine.cell_record import CellRecord, PropertyRecord
from lossgate.engine.output_record import OutputRecord
from lossgate.evidence.summary import CellSummary
from lossgate.reports.console import print_whole, printable
from lossgate.reports.describe import describe, escaped, marked, print_detail
from lossgate.reports.resource_lines import resource_lines
from lossgate.reports.run_lines import moment
from lossgate.reports.shown_verdict import broken_in_words, percent, share

_TIMES = 5
"""How many of the last verdicts of a cell are shown."""


def print_story(console: Console, record: CellRecord, results: Sequence[CellSummary]) -> None:
    """Prints everything that is known of a cell.

    Args:
        console: where to print.
        record: the newest record of the cell.
        results: all results of the cell, the newest last.
    """
    shown = results[-1]
    broken = f": {broken}" if (broken := broken_in_words([shown])) else ""
    console.print(f"{marked(shown)}  {escaped(f'{record.key}{broken}')}", soft_wrap=True)
    for line in [*describe(shown, whole=True), *(f"  {escaped(line)}" for line in _about(record, results))]:
        print_detail(console, line)
    if record.outputs:
        console.print()
        print_whole(console, _outputs(record.outputs))
    console.print()
    for line in _sight(record):
        print_detail(console, f"  {escaped(line)}")
    for worst in record.worst:
        near = f"{worst.output}: {worst.statistic} {worst.value:.4g}, limit {worst.limit:.4g}; its problem:"
        print_detail(console, f"  closest to a limit: {escaped(near)}")
        problem = msgspec.json.encode(worst.problem).decode()
        console.print(f"    {escaped(problem)}", soft_wrap=True)  # whole, to be copied
    console.print()


def _about(record: CellRecord, results: Sequence[CellSummary]) -> Iterator[str]:
    yield f"what: {record.spec} from {record.head}, declared as {record.source}"
    yield f"when: {moment(record.time)}, {record.seconds:.1f} s, in run {record.run}"
    if len(results) > 1:
        times = sorted(one.time for one in results)
        verdicts = ", ".join(one.outcome for one in results[-_TIMES:])
        yield f"before: {len(results)} runs, from {moment(times[0])} to {moment(times[-1])}; the last: {verdicts}"
    problems, comparisons = counted(record.problems, "problem"), counted(record.comparisons, "comparison")
    yield f"seen: {problems}, {comparisons}, detects {percent(record.mde)}"
    if record.tokens_in_all:
        yield f"tokens: {record.tokens_in_all:,} in all problems, {record.tokens:,} in the longest"
    if record.mistakes_shown:
        yield f"known mistakes: the problems would have shown {record.mistakes_shown:,}"
    yield from (f"would have passed: {mistake}" for mistake in record.mistakes_surviving)
    yield from (f"too small to be shown: {mistake}" for mistake in record.mistakes_too_small)
    yield from (f"not distinguished: {choices}" for choices in record.not_distinguished)
    yield from (f"not given: {what}, {why}" for what, why in record.excluded.items())
    yield from (f"convention {what}: {words}" for what, words in record.conventions.items())


def _outputs(outputs: Sequence[OutputRecord]) -> Table:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  output", overflow="fold")
    table.add_column("pooled scale +- limit", overflow="fold", min_width=10)
    for heading in ("detects", "worst / limit", "problems"):
        table.add_column(heading, justify="right", min_width=8)
    for output in outputs:
        detects = percent(None if output.pooled is None else output.pooled.mde)
        cells = (_pooled(output), detects, _worst(output), str(len(output.cases)))
        table.add_row(Text(f"  {printable(output.name)}"), *map(Text, cells))
    return table


def _pooled(output: OutputRecord) -> str:
    return "never compared" if output.pooled is None else f"{output.pooled.scale:.2g} +- {output.pooled.limit:.2g}"


def _worst(output: OutputRecord) -> str:
    """Returns the largest share of a limit, and the name of its statistic unless the share is 0."""
    margins = output.margins
    name = max(margins, key=lambda one: margins[one])
    shown = share(margins[name], whole=True)
    return f"{shown} {printable(name)}" if margins[name] else shown


def _sight(record: CellRecord) -> Iterator[str]:
    """Yields lines about the power of the problems, the option mutants and further properties."""
    for output in record.outputs:
        if output.planted:
            planted = ", ".join(f"{name} {rejected:.0%}" for name, rejected in output.planted.items())
            yield f"planted errors rejected in {output.name}: {planted}"
        for name in output.blind:
            yield f"planted error accepted in {output.name} although the limits say otherwise: {name}"
    required = frozenset(record.required)
    for goal in dict.fromkeys([*record.required, *record.coverage]):
        needed = "" if goal in required else "  (not required)"
        yield f"goal {goal}: {counted(record.coverage.get(goal, 0), 'problem')}{needed}"
    surviving = sorted(set(record.surviving) - set(record.equivalent))
    mutants = [f"{record.killed} killed"]
    mutants += [f"surviving: {', '.join(surviving)}"] if surviving else []
    mutants += [f"equivalent: {', '.join(record.equivalent)}"] if record.equivalent else []
    yield f"option mutants: {'; '.join(mutants)}"
    yield from map(_of_property, record.properties)
    yield from resource_lines(record.resources)


def _of_property(found: PropertyRecord) -> str:
    """Returns a line about a property other than that of the cell."""
    if found.exempt:
        return f"property {found.name}: exempt, {found.exempt}"
    if not found.problems:
        return f"property {found.name}: no problem says anything about it"
    margin = f", at most {share(found.margin)} of a limit" if found.comparisons else ""
    word = "kept" if found.holds else "broken"
    because = ""
    if found.explained is not None:
        because = f", {'perhaps as' if found.explained.how == 'perhaps' else 'as'} property {found.explained.by} is"
    return (
        f"property {found.name}: {word} on {counted(found.problems, 'problem')}{because}{margin}, {found.seconds:.2g} s"
    )
