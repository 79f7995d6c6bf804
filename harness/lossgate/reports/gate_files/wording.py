# SPDX-License-Identifier: Apache-2.0
"""What all files say about a verdict: its sentence, and its blockers by cell."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lossgate.evidence.records import CellKey
from lossgate.evidence.summary import CellSummary
from lossgate.gate.verdict import Blocker, GatedCell, GateVerdict
from lossgate.reports.remarks import EXCLUDED, EXEMPT, NOT_DISTINGUISHED, remark_lines
from lossgate.reports.resource_lines import resource_lines


def in_words(verdict: GateVerdict) -> str:
    """Returns the verdict as a sentence."""
    if verdict.passes:
        excused = sum(1 for cell in verdict.cells if cell.excused)
        by_known = f", {excused} of them excused by known failures" if excused else ""
        return f"The gate is open: {_cells(len(verdict.cells))}{by_known}"
    kinds = Counter(blocker.kind for blocker in verdict.blockers)
    reasons = "1 reason" if len(verdict.blockers) == 1 else f"{len(verdict.blockers)} reasons"
    return f"The gate is closed for {reasons}: {', '.join(f'{kind} ({n})' for kind, n in kinds.items())}"


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def by_cell(verdict: GateVerdict) -> tuple[Sequence[Blocker], dict[CellKey, list[Blocker]]]:
    """Returns the blockers of no cell, and the blockers of each cell of the verdict.

    A blocker that names a cell which the verdict does not list is counted to those of no cell, so
    that no file leaves it out.
    """
    cells: dict[CellKey, list[Blocker]] = {cell.key: [] for cell in verdict.cells}
    general: list[Blocker] = []
    for blocker in verdict.blockers:
        (general if blocker.cell is None else cells.get(blocker.cell, general)).append(blocker)
    return general, cells


def short_name(key: CellKey) -> str:
    """Returns the name of a cell among those of its candidate."""
    where = "" if (key.world, key.device) == ("simulated", "cpu") else f" on {key.world}/{key.device}"
    return f"{key.property}-{key.layout}-{key.dtype}{where}"


def replay_of(cell: GatedCell | None) -> str:
    """Returns the command that shows the disagreement of a cell again; empty if there is none."""
    failure = cell.summary.failure if cell is not None and cell.summary is not None else None
    return failure.replay or "" if failure is not None else ""


def remarks_of(verdict: GateVerdict) -> list[list[str]]:
    """Returns three groups of lines, each a heading and what follows it: choices that are not
    distinguished, properties to which candidates are not held, and problems that they are not
    given. A group may be empty.
    """
    summaries = [cell.summary for cell in verdict.cells if cell.summary is not None]
    not_distinguished = ((one.key.candidate, one.not_distinguished) for one in summaries)
    exempt = ((one.key.candidate, tuple(f"{name}: {why}" for name, why in one.exempt)) for one in summaries)
    excluded = ((one.key.candidate, tuple(f"{what}: {why}" for what, why in one.excluded)) for one in summaries)
    headings = {NOT_DISTINGUISHED: not_distinguished, EXEMPT: exempt, EXCLUDED: excluded}
    return [remark_lines(heading, cells) for heading, cells in headings.items()]


def note(cell: GatedCell) -> str:
    """Returns why a cell without blockers passes although it does not agree; or, of one that does,
    which choices of options were not distinguished, to which properties it was held, which problems
    it was not given, and what a call used.
    """
    if cell.excused:
        return f"excused by a known failure: {cell.excused}"
    if cell.verdict == "AGREE":
        return "" if cell.summary is None else "\n".join(_seen(cell.summary))
    return f"{cell.verdict}, but no rule of the policy asks for this cell"


def _seen(summary: CellSummary) -> Iterator[str]:
    if summary.not_distinguished:
        yield f"not distinguished: {'; '.join(summary.not_distinguished)}"
    if summary.kept:
        yield f"keeps: {', '.join(summary.kept)}"
    if summary.exempt:
        yield f"exempt: {'; '.join(f'{name}: {why}' for name, why in summary.exempt)}"
    if summary.excluded:
        yield f"not given: {'; '.join(f'{what}: {why}' for what, why in summary.excluded)}"
    yield from resource_lines(summary.resources)
