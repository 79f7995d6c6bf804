# SPDX-License-Identifier: Apache-2.0
"""Jobs for children, as data that pickles. Candidates are given by their sources."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from lossgate.base.errors import CandidateError
from lossgate.base.layout import Layout
from lossgate.cases.case import Case
from lossgate.cases.random_numbers import has_drawn, other_numbers
from lossgate.declaration.loading import load_candidate, load_candidates
from lossgate.engine.advice import with_todo
from lossgate.engine.case_result import CaseResult, run_case
from lossgate.engine.cell import Cell
from lossgate.engine.cell_record import CellRecord
from lossgate.engine.child import News, forget_printed, tell
from lossgate.engine.elsewhere import tell_candidates
from lossgate.engine.own_mistakes import said_by
from lossgate.engine.run_cell import run_cell
from lossgate.engine.settings import Settings
from lossgate.problems.problem import Problem
from lossgate.properties import find_property
from lossgate.worlds import make_world
from lossgate.worlds.base import RankFailure


@dataclass(frozen=True)
class CellName:
    """A cell as data that any process can read."""

    source: str
    property: str
    layout: Layout
    dtype: str
    world: str
    device: str
    also: tuple[str, ...] = ()

    @classmethod
    def of(cls, cell: Cell) -> "CellName":
        source, held_to, also = cell.candidate.source, cell.property.name, tuple(map(str, cell.also))
        return cls(source, held_to, cell.layout, cell.dtype, cell.world, cell.device, also)

    def load(self) -> Cell:
        """Loads the candidate and finds the properties."""
        held_to, also = find_property(self.property), tuple(map(find_property, self.also))
        return Cell(load_candidate(self.source), self.layout, self.dtype, held_to, self.world, self.device, also)


@dataclass(frozen=True)
class _InCell:
    """A job in a cell."""

    name: CellName
    sources: Sequence[str]
    """The sources of candidates. Their files may also register properties."""

    def load(self) -> None:
        for source in self.sources:
            load_candidate(source)
        forget_printed()  # what imports print is no output of kernels


@dataclass(frozen=True)
class CellJob(_InCell):
    """Verifies a cell.

    It returns the record, and the fields of the ``CellRun`` without the cell, which the parent has.
    """

    settings: Settings

    def run(self) -> tuple[CellRecord, dict[str, Any]]:
        result = run_cell(self.name.load(), self.settings, lambda: tell(News.AGREES))
        run = {f.name: getattr(result.run, f.name) for f in fields(result.run) if f.name != "cell"}
        return result.record, run


@dataclass(frozen=True)
class ImportJob:
    """Imports a file or module of candidates, and tells of them. It runs none."""

    location: str

    def load(self) -> None:
        load_candidates(self.location)

    def run(self) -> bytes | None:
        return tell_candidates(self.location)


@dataclass(frozen=True)
class CasesJob(_InCell):
    """Runs problems of a cell one after the other, and returns their results."""

    problems: Sequence[Problem]
    timeout: float
    series: int = 0
    """The series of random numbers from which the kernel draws."""

    def run(self) -> list[CaseResult]:
        with other_numbers(self.series):
            cases = run_cases(self.name.load(), self.problems, self.timeout)
        return [replace(case, draws=has_drawn()) for case in cases]


def run_cases(cell: Cell, problems: Sequence[Problem], timeout: float) -> list[CaseResult]:
    """Runs problems of a cell one after the other, in this process."""
    world = make_world(cell.world, cell.layout, timeout, cell.device)
    try:
        return [_run_case(cell, Case(cell.candidate, problem, world)) for problem in problems]
    finally:
        world.close()


def _run_case(cell: Cell, case: Case) -> CaseResult:
    result = run_case(case, cell.property)
    if not result.agrees:
        return with_todo(cell, result, case.world)
    with suppress(RankFailure, CandidateError):  # the property calls the kernel in another way, which is right
        return replace(result, said=said_by(case, cell.property))
    return result
