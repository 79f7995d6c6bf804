# SPDX-License-Identifier: Apache-2.0
"""Tells which known mistakes the problems of a configuration show. No kernel is run.

The problems are those that a run would try with a right kernel. On each of them, the reference with
a mistake takes the place of the kernel. The mistake shows if the judge would reject its outputs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from time import process_time

import torch

from lossgate.adequacy.known_mistakes import KnownMistakes, Unshown
from lossgate.base.layout import Layout
from lossgate.cases.case import Case
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
    of_properties: Mapping[str, tuple[Layout, ...]]
    """The mistakes that a property is there to find but that no problem of a cell could show, and
    the layouts of these cells."""
    seconds: float
    """CPU time."""


def audit(candidates: Iterable[Candidate], settings: Settings, *, metrics: bool = False) -> Iterator[Audit]:
    """Yields, for each candidate, the known mistakes that its cells would have seen.

    The mistakes are judged by the outputs that a kernel must return: the loss, other outputs that
    are declared differentiable, and gradients. Of the further properties, a mistake counts if no
    problem could show it. Large problems and candidates with a known failure are left out.

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
    mistakes, problems, of_properties = KnownMistakes(candidate, metrics=metrics), 0, dict[str, tuple[Layout, ...]]()
    torch.set_num_threads(1)
    try:
        for cell in cells:
            with closing(make_world("simulated", cell.layout, settings.timeout)) as world:
                first = Search(cell, world, settings).first_problems()
                cases = [Case(candidate, placed.problem, world, placed.entry.bound) for placed in first]
                for sentence in _hidden_from_properties(cell, cases):
                    of_properties[sentence] = (*of_properties.get(sentence, ()), cell.layout)
            problems += len(cases)
            for case in cases:
                mistakes.ask(case.placed)
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
        of_properties=of_properties,
        seconds=process_time() - start,
    )


def _hidden_from_properties(cell: Cell, cases: Sequence[Case]) -> Iterator[str]:
    """Yields the mistakes that properties of a cell are there to find and that no problem could
    show.
    """
    for held_to in cell.also:
        if held_to.name in cell.candidate.exempt:
            continue
        asked = [case for case in cases if held_to.fits(case)]
        for own in held_to.mistakes(cell.candidate):
            if any(map(own.matters, asked)) and not any(map(own.can_show, asked)):
                yield f"property {held_to.name}: {own.sentence}"
