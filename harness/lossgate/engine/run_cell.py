# SPDX-License-Identifier: Apache-2.0
"""Verifies one cell."""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch

from lossgate.base.errors import UsageError
from lossgate.cases.case import Case
from lossgate.cases.large import is_large
from lossgate.engine.advice import convention_of_numbers, with_todo
from lossgate.engine.case_result import run_case
from lossgate.engine.catalogue import Catalogue
from lossgate.engine.cell import Cell, CellResult, CellRun
from lossgate.engine.cell_record import Verdict
from lossgate.engine.diagnose import diagnose
from lossgate.engine.plan import read_known_failure
from lossgate.engine.search import Search
from lossgate.engine.set_aside import SetAside
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import Judged, conclude, conclude_beside, conclude_known, is_expected, judge
from lossgate.worlds import make_world
from lossgate.worlds.base import World


def run_cell(cell: Cell, settings: Settings, agrees: Callable[[], object] = bool) -> CellResult:
    """Verifies one cell. More rounds of problems are tried while the cell is inconclusive.

    Args:
        cell: what to verify.
        settings: how much is tried.
        agrees: is called if the cell agrees, before its other properties are checked.
    """
    start = perf_counter()
    try:
        world = make_world(cell.world, cell.layout, settings.timeout, cell.device)
    except UsageError as error:
        # The world of a known failure comes from its frozen example, not from the settings.
        of_settings = cell.candidate.known_failure is None
        origin = settings.where("device") or settings.where("world") if of_settings else ""
        raise UsageError(f"{origin}{error}") from None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # numbers depend on how many threads compute them
    try:
        return _run_in(world, cell, settings, start, agrees)
    finally:
        torch.set_num_threads(threads)
        world.close()


def _run_in(world: World, cell: Cell, settings: Settings, start: float, agrees: Callable[[], object]) -> CellResult:
    if known := cell.candidate.known_failure:
        file = read_known_failure(known)
        frozen = file.examples[0]
        case = Case(cell.candidate, frozen.problem, world)
        now = run_case(case, cell.property)
        goes_on = cell.property.needs_adequacy and is_expected(frozen, now)
        aside = SetAside.of(case, now, file.causes) if goes_on else None
        if aside is None or not aside.explains:
            explained = aside is None
            return conclude_known(cell, known, frozen, now, perf_counter() - start, explained=explained)
        search = Search(cell, world, settings, aside=aside)
        run, _ = _searched(search, world, settings, start)
        if run.failure is None:
            return conclude_known(cell, known, frozen, now, run.seconds, beside=aside.words(run))
        return conclude_beside(known, run)
    search = Search(cell, world, settings)
    run, verdict = _searched(search, world, settings, start)
    if verdict is Verdict.DISAGREE:
        return conclude(_diagnosed(run, world, settings))
    if verdict is Verdict.AGREE and cell.also:
        agrees()
    catalogue = Catalogue(cell, world, settings, search)
    properties = catalogue.run()  # before the rest is collected, because it may run more problems
    run = _run_so_far(search, world, start, catalogue, advises=verdict is Verdict.INCONCLUSIVE)
    run = replace(run, properties=properties)
    return conclude(run if search.failure is None else _diagnosed(run, world, settings))


def _searched(search: Search, world: World, settings: Settings, start: float) -> tuple[CellRun, Verdict]:
    """Runs rounds of problems while the cell is inconclusive and more problems may help.

    Returns:
        What was run, and the verdict on it, before the further properties are checked.
    """

    def judged_run() -> tuple[CellRun, Judged]:
        run = _run_so_far(search, world, start)
        return run, judge(run)

    search.run()
    run, judged = judged_run()
    for round_ in range(1, settings.rounds):
        if judged.verdict is not Verdict.INCONCLUSIVE:
            break
        if judged.gaps or run.surviving:
            search.fill_gaps(round_)
            run, judged = judged_run()
        if judged.gaps:
            search.run(round_)
            run, judged = judged_run()
    return run, judged.verdict


def _diagnosed(run: CellRun, world: World, settings: Settings) -> CellRun:
    """Adds the cause, if outputs disagree. An exception of a rank needs no other cause."""
    cell, failure = run.cell, run.failure
    if not cell.property.needs_adequacy or failure is None or failure.failure or not failure.comparisons:
        return run
    smallest = failure.problem
    first = next(case.problem for case in run.cases if not case.agrees)
    example = smallest if is_large(first) else first
    if is_large(example):
        return run
    found = diagnose(cell, example, world, settings)
    convention = convention_of_numbers(cell, [smallest] if example == smallest else [smallest, example], world)
    return replace(run, diagnosis=replace(found, convention=convention))


def _run_so_far(
    search: Search, world: World, start: float, catalogue: Catalogue | None = None, *, advises: bool = False
) -> CellRun:
    """Collects everything that was run so far, without the records of further properties.

    If ``advises``, it has numbers for advice on an inconclusive verdict. They take longer to find.
    """
    found: Search | Catalogue = search
    if catalogue is not None and catalogue.failure is not None and search.failure is None:
        found = catalogue
    measured = (case.resources for case in search.cases if case.resources)
    resources = catalogue.resources if catalogue is not None else {}
    return CellRun(
        cell=search.cell,
        cases=tuple(search.cases),
        failure=None if found.failure is None else with_todo(search.cell, found.failure, world),
        shrink_calls=found.shrink_calls,
        seconds=perf_counter() - start,
        surviving=search.still_to_kill,
        equivalent=search.equivalent.intersection(search.surviving),
        hidden_by_exclusions=search.hidden_by_exclusions,
        tried=search.tried_on_survivors() if advises else {},
        not_distinguished=search.not_distinguished,
        drawn=search.drawn_for_goals if advises else {},
        mistakes=search.mistakes,
        untried=search.untried,
        resources=resources or next(measured, {}),
    )
