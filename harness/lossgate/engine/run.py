# SPDX-License-Identifier: Apache-2.0
"""Runs cells and reports what happens."""

import os
from collections.abc import Generator, Iterable
from contextlib import closing

from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import has_source
from lossgate.engine.cell import CellResult
from lossgate.engine.events import CellFinished, Event, RunFinished, RunStarted
from lossgate.engine.plan import plan
from lossgate.engine.run_cell import run_cell
from lossgate.engine.second_look import look_again
from lossgate.engine.settings import Settings
from lossgate.engine.shards import Shard
from lossgate.engine.workers import run_side_by_side
from lossgate.worlds.base import WorldLost


def run(candidates: Iterable[Candidate], settings: Settings, shard: Shard | None = None) -> Generator[Event]:
    """Verifies candidates, or one part of their cells; yields what happens, in the order of the
    plan.

    Candidates on simulated ranks run in other processes, so that none ends this one. Those that
    were made in a function or a notebook, which no other process can load, run in this one if
    there is one job. Ranks of torchrun verify one cell after another, whatever ``jobs`` says.
    """
    matrix = plan(candidates, settings)
    cells = matrix if shard is None else shard.take(matrix)
    yield RunStarted(tuple(cells), settings, tuple(matrix), shard)
    jobs = 1 if settings.world == "torchrun" else min(settings.jobs or os.cpu_count() or 1, len(cells))
    own = jobs == 1 and (settings.world != "simulated" or not all(has_source(cell.candidate) for cell in cells))
    done = (run_cell(cell, settings) for cell in cells) if own else run_side_by_side(cells, settings, jobs)
    results, stopped = list[CellResult](), ""
    with closing(done):
        try:
            for found in done:
                result = found if own or settings.world != "simulated" else look_again(found, settings.timeout)
                results.append(result)
                yield CellFinished(result)
        except WorldLost as lost:
            stopped = str(lost)
    yield RunFinished(tuple(results), stopped)
