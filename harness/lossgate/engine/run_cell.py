# SPDX-License-Identifier: Apache-2.0
"""Verifies one cell."""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from lossgate.base.errors import UsageError
from lossgate.cases.case import Case
from lossgate.cases.large import is_large
from lossgate.engine.case_result import run_case
from lossgate.engine.catalogue import Catalogue
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.cell_record import Verdict
from lossgate.engine.diagnose import diagnose
from lossgate.engine.plan import read_known_failure
from lossgate.engine.precision_advice import with_todo
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import conclude, conclude_known, judge
from lossgate.worlds import make_world
from lossgate.worlds.base import World


def run_cell(cell: Cell, settings: Settings, agrees: Callable[[], object] = bool) -> CellResult:
    """Verifies one cell. More problems are tried as long as they leave it inconclusive.

    It computes with one thread, because the numbers of many threads depend on how many there are.

    Args:
        cell: what to verify.
        settings: how much is tried.
        agrees: is called if it agrees, before it is held to its other properties.
    """
    start = perf_counter()
    try:
        world = make_world(cell.world, cell.layout, settings.timeout, cell.device)
    except UsageError as error:
        given = settings.where("device") or settings.where("world")
        raise UsageError(f"{given if cell.candidate.known_failure is None else ''}{error}") from None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run_in(world, cell, settings, start, agrees)
    finally:
        torch.set_num_threads(threads)
        world.close()


def _run_in(world: World, cell: Cell, settings: Settings, start: float, agrees: Callable[[], object]) -> CellResult:
    if known := cell.candidate.known_failure:
        frozen = read_known_failure(known).examples[0]
        now = run_case(Case(cell.candidate, frozen.problem, world), cell.property)
        return conclude_known(cell, known, frozen, now, perf_counter() - start)
    search = Search(cell, world, settings)
    search.run()
    run = _ran(search, world, start)
    for round_ in range(1, settings.rounds):
        if _needs_more(run):
            search.fill_gaps(round_)
            run = _ran(search, world, start)
        if judge(run).gaps:
            search.run(round_)
            run = _ran(search, world, start)
    verdict = judge(run).verdict
    if verdict is Verdict.DISAGREE:
        return conclude(_diagnosed(run, world, settings))
    if verdict is Verdict.AGREE and cell.also:
        agrees()
    catalogue = Catalogue(cell, world, settings, search)
    run = _ran(search, world, start, catalogue, last=verdict is Verdict.INCONCLUSIVE)
    return conclude(run if search.failure is None else _diagnosed(run, world, settings))


def _needs_more(run: CellRun) -> bool:
    """Returns whether more problems may change the verdict."""
    judged = judge(run)
    return judged.verdict is Verdict.INCONCLUSIVE and bool(judged.gaps or run.surviving)


def _diagnosed(run: CellRun, world: World, settings: Settings) -> CellRun:
    """Adds the cause, if outputs disagree. What a rank raised says its own."""
    cell, failure = run.cell, run.failure
    if not cell.property.needs_adequacy or failure is None or failure.failure or not failure.comparisons:
        return run
    first = next(case.problem for case in run.cases if not case.agrees)
    if is_large(first):
        first = failure.problem
    if is_large(first):
        return run
    return replace(run, diagnosis=diagnose(cell, first, world, settings, smallest=failure.problem))


def _ran(
    search: Search, world: World, start: float, catalogue: Catalogue | None = None, *, last: bool = False
) -> CellRun:
    """Returns what was run so far.

    Args:
        search: the problems that were tried.
        world: where the ranks ran.
        start: when the cell was begun.
        catalogue: holds the candidate to its other properties.
        last: whether to ask what advice needs, which takes longer.
    """
    properties = catalogue.run() if catalogue is not None else ()
    found = search if catalogue is None or catalogue.failure is None else catalogue
    measured = (case.resources for case in search.cases if case.resources)
    return CellRun(
        cell=search.cell,
        cases=tuple(search.cases),
        failure=None if found.failure is None else with_todo(search.cell, found.failure, world),
        shrink_calls=found.shrink_calls,
        seconds=perf_counter() - start,
        properties=properties,
        surviving=search.still_to_kill,
        equivalent=search.equivalent.intersection(search.surviving),
        tried=search.tried_on_survivors() if last else {},
        not_distinguished=search.not_distinguished,
        drawn=search.drawn_for_goals if last else {},
        mistakes=search.mistakes,
        untried=search.untried,
        resources=(catalogue.resources if catalogue is not None else {}) or next(measured, {}),
    )
