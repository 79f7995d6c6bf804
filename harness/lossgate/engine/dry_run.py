# SPDX-License-Identifier: Apache-2.0
"""Tells which known mistakes the problems of a configuration show. No kernel is run.

The problems are those that a run would try with a right kernel. On each of them, the reference with
a mistake takes the place of the kernel. The mistake shows if the judge would reject its outputs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from time import process_time

import torch

from lossgate.adequacy.known_mistakes import KnownMistakes, Unshown
from lossgate.cases.placement import PlacedProblem
from lossgate.declaration.candidate import Candidate
from lossgate.engine.cell import Cell
from lossgate.engine.plan import plan
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.worlds import make_world


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The known mistakes that the cells of a candidate would have seen, and those that they would
    not.
    """

    candidate: Candidate
    cells: int
    problems: int
    seen: Mapping[str, str]
    """The sentences of the mistakes that a problem shows, by name."""
    unseen: Mapping[str, Unshown]
    """The mistakes that change an output but that no problem shows, by name."""
    unchanged: Mapping[str, str]
    """The sentences of the mistakes that change nothing on any problem, by name."""
    impossible: Mapping[str, str]
    """The sentences of the mistakes that can't be made on any problem, by name. They need other
    layouts, options or tiles."""
    seconds: float
    """CPU time."""


def audit(candidates: Iterable[Candidate], settings: Settings, *, metrics: bool = False) -> Iterator[Audit]:
    """Yields, for each candidate, the known mistakes that its cells would have seen.

    The mistakes are judged by the outputs that a kernel must return: the loss, other outputs that
    are declared differentiable, and gradients. Large problems, properties other than agreement and
    candidates with a known failure are left out.

    Args:
        candidates: the candidates. They only declare which problems they take, and are not called.
        settings: the configuration.
        metrics: whether to ask about metrics, too, as if kernels returned all of their spec.
    """
    cells = [cell for cell in plan(candidates, settings) if cell.property.needs_adequacy]
    right = (cell for cell in cells if cell.candidate.known_failure is None)
    for candidate, own in groupby(right, lambda cell: cell.candidate):
        yield _of_candidate(candidate, list(own), settings, metrics=metrics)


def _of_candidate(candidate: Candidate, cells: list[Cell], settings: Settings, *, metrics: bool) -> Audit:
    start, threads = process_time(), torch.get_num_threads()
    mistakes, problems = KnownMistakes(candidate, metrics=metrics), 0
    torch.set_num_threads(1)
    try:
        for cell in cells:
            for placed in _problems(cell, settings):
                problems += 1
                mistakes.ask(placed)
    finally:
        torch.set_num_threads(threads)
    # The other mistakes changed no output. Some of them could not even be made.
    others = {name: one.words("an output") for name, one in mistakes.left.items() if name not in mistakes.unseen}
    unchanged = {name: sentence for name, sentence in others.items() if mistakes.made[name]}
    impossible = {name: sentence for name, sentence in others.items() if not mistakes.made[name]}
    return Audit(
        candidate=candidate,
        cells=len(cells),
        problems=problems,
        seen=mistakes.seen,
        unseen=mistakes.unseen,
        unchanged=unchanged,
        impossible=impossible,
        seconds=process_time() - start,
    )


def _problems(cell: Cell, settings: Settings) -> Iterator[PlacedProblem]:
    """Yields the problems of ordinary size that the first round of a cell tries."""
    world = make_world("simulated", cell.layout, settings.timeout)
    try:
        for placed in Search(cell, world, settings).first_problems():
            yield PlacedProblem(placed.entry.bound, placed.problem)
    finally:
        world.close()
