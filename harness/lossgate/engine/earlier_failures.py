# SPDX-License-Identifier: Apache-2.0
"""Holds a cell to the problems in its failure files of earlier runs.

A run with another seed or profile has other problems, and may not find a failure again. A kernel
that still disagrees on the old problem is wrong all the same.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import msgspec

from lossgate.base.errors import UsageError
from lossgate.base.spelling import counted
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.cell_record import Verdict
from lossgate.engine.failure_files import FailureFile, failure_files_of, read_failure
from lossgate.engine.judge_again import judge_again
from lossgate.engine.verdict import conclude
from lossgate.worlds.base import WorldLost


def hold_to_earlier(
    result: CellResult, folder: Path, timeout: float, known: Collection[Path]
) -> tuple[CellResult, tuple[Path, ...]]:
    """Replays the failure files of a cell, unless its numbers disagree already.

    Args:
        result: the result on the problems of this run.
        folder: where earlier runs wrote failure files.
        timeout: seconds after which ranks that make no progress count as hanging.
        known: the files of known failures. They are not replayed.

    Returns:
        The result, which is a disagreement if a file shows one; and the files that are of no more
        use, because the cell and their problems agree now.
    """
    fails = result.verdict is Verdict.DISAGREE and result.record.numbers in (None, Verdict.DISAGREE)
    if fails or result.cell.candidate.known_failure is not None:
        return result, ()
    mended = list[Path]()
    for held_to in _kept_properties(result):
        for file in failure_files_of(result.cell, held_to, folder):
            if file.resolve() in known:
                continue
            try:
                found = _replayed(result, read_failure(file), timeout)
            except (UsageError, WorldLost):  # nothing is known about the kernel
                continue
            if found is not None:
                return found, ()
            mended.append(file)
    agrees = result.verdict is Verdict.AGREE
    return result, (tuple(mended) if agrees else ())


def examples_of(cells: Iterable[Cell]) -> set[Path]:
    """Returns the failure files that the candidates of cells declare as known."""
    known = (cell.candidate.known_failure for cell in cells)
    return {one.example.resolve() for one in known if one is not None}


def _kept_properties(result: CellResult) -> list[str]:
    """Returns the properties that a cell was checked for and keeps."""
    return list(dict.fromkeys([result.cell.property.name, *result.record.kept]))


def _replayed(result: CellResult, failure: FailureFile, timeout: float) -> CellResult | None:
    """Returns the disagreement that a file shows; None if its problems agree now."""
    again = judge_again(failure, result.cell.held_to(failure.property), timeout)
    if not again.wrong:
        return None
    agreed = counted(len(result.cases), "problem")
    line = f"on the failure file of an earlier run; the {agreed} of this run showed nothing wrong"
    failing = again.failing
    if failing is None:
        # The problems of the file disagree only when pooled, so they are pooled without others.
        found = _concluded(result, replace(result.run, cases=tuple(again.cases), failure=None, shrink_calls=0))
        return replace(found, record=msgspec.structs.replace(found.record, reasons=(*found.reasons, line)))
    failing = replace(failing, findings=(*failing.findings, line), earlier=failure.earlier)
    is_own = failing.held_to == result.cell.property.name
    cases = (*result.cases, *again.cases) if is_own else result.cases
    properties = tuple(
        msgspec.structs.replace(one, findings=failing.findings, on=failing.problem.describe())
        if one.name == failing.held_to
        else one
        for one in result.run.properties
    )
    run = replace(result.run, cases=cases, failure=failing, shrink_calls=0, properties=properties)
    return _concluded(result, run)


def _concluded(result: CellResult, run: CellRun) -> CellResult:
    return replace(conclude(run), printed=result.printed)
