# SPDX-License-Identifier: Apache-2.0
"""Holds a cell to the problems on which it disagreed in earlier runs, as their failure files say.

A run has other problems than one with another seed or profile, and need not find a failure again. A
kernel that disagrees on a problem that is known is wrong all the same.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from lossgate.base.errors import UsageError
from lossgate.base.spelling import counted
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult
from lossgate.engine.cell_record import Verdict
from lossgate.engine.failure_files import FailureFile, failure_files_of, read_failure
from lossgate.engine.judge_again import judge_again
from lossgate.engine.verdict import conclude
from lossgate.worlds.base import WorldLost


def hold_to_earlier(
    result: CellResult, folder: Path, timeout: float, known: Collection[Path]
) -> tuple[CellResult, tuple[Path, ...]]:
    """Replays the failure files of a cell, unless it disagrees already.

    Args:
        result: what came of the problems of this run.
        folder: where earlier runs wrote failure files.
        timeout: seconds after which ranks that do not go on count as hanging.
        known: the files of known failures, which are left alone.

    Returns:
        The result, which is a disagreement if one of the files is. And the files whose problems
        agree now, with their cell: they are of no more use.
    """
    mended = list[Path]()
    if result.verdict is Verdict.DISAGREE or result.cell.candidate.known_failure is not None:
        return result, ()
    for held_to in _kept_properties(result):
        for file in failure_files_of(result.cell, held_to, folder):
            if file.resolve() in known:
                continue
            try:
                found = _replayed(result, read_failure(file), timeout)
            except (UsageError, WorldLost):  # nothing is known of it
                continue
            if found is not None:
                return found, ()
            mended.append(file)
    return result, tuple(mended) if result.verdict is Verdict.AGREE else ()


def examples_of(cells: Iterable[Cell]) -> set[Path]:
    """Returns the failure files that the candidates of cells declare as known."""
    known = (cell.candidate.known_failure for cell in cells)
    return {one.example.resolve() for one in known if one is not None}


def _kept_properties(result: CellResult) -> list[str]:
    """Returns the properties that a cell was seen to keep."""
    own = result.cell.property.name
    return [own, *(one.name for one in result.run.properties if one.problems and one.holds and one.name != own)]


def _replayed(result: CellResult, failure: FailureFile, timeout: float) -> CellResult | None:
    """Returns the disagreement that a file shows; None if its problems agree now."""
    again = judge_again(failure, result.cell.held_to(failure.property), timeout)
    if not again.wrong:
        return None
    agreed = counted(len(result.cases), "problem")
    line = f"on what an earlier run kept in its failure file; the {agreed} of this run showed nothing wrong"
    failing = again.failing
    if failing is not None:
        failing = replace(failing, findings=(*failing.findings, line), earlier=failure.earlier)
    found = _concluded(result, again.cases, failing)
    if failing is not None:
        return found
    return replace(found, record=msgspec.structs.replace(found.record, reasons=(*found.reasons, line)))


def _concluded(result: CellResult, cases: Sequence[CaseResult], failing: CaseResult | None) -> CellResult:
    """Returns the verdict with the problems of a file, too. Those that disagree only when pooled
    are pooled without others.
    """
    own = result.cell.property.name
    held_to = own if failing is None else failing.held_to
    tried = cases if failing is None else (*result.cases, *cases) if held_to == own else result.cases
    properties = tuple(
        msgspec.structs.replace(one, findings=failing.findings, on=failing.problem.describe())
        if failing is not None and one.name == held_to
        else one
        for one in result.run.properties
    )
    run = replace(result.run, cases=tuple(tried), failure=failing, shrink_calls=0, properties=properties)
    return replace(conclude(run), printed=result.printed)
