# SPDX-License-Identifier: Apache-2.0
"""Looks for the cause of a disagreement, on problems of the cell's deck."""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, product

from lossgate.adequacy.deck import deck_of
from lossgate.adequacy.entry import Entry
from lossgate.base.layout import MAX_RANKS, Layout
from lossgate.cases.bound_problem import BoundProblem
from lossgate.cases.case import Case
from lossgate.cases.large import is_large
from lossgate.cases.placement import splits_of
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.diagnosis.cause import Diagnosis
from lossgate.diagnosis.name_cause import name_cause
from lossgate.engine.cell import Cell
from lossgate.engine.settings import Settings
from lossgate.problems.problem import Problem
from lossgate.worlds import make_world
from lossgate.worlds.base import World

_PATIENCE = 10.0
"""Seconds after which a rank hangs that is asked on another layout than the cell's."""


def diagnose(
    cell: Cell,
    failing: Problem,
    world: World,
    settings: Settings,
    without: Collection[str] = (),
    smallest: Problem | None = None,
) -> Diagnosis | None:
    """Returns what explains that a kernel disagrees; None if too few problems tell.

    Args:
        cell: whose property is agreement.
        failing: the first problem on which it disagreed, before it was made smaller.
        world: where its ranks run.
        settings: its seed chooses the problems.
        without: names that are not to be said.
        smallest: the problem that is shown, after it was made smaller.
    """
    bank = counterfactuals_of(cell.candidate.spec, cell.candidate.head)
    with further_cases(cell, failing, world, settings) as cases:
        shown = Case(cell.candidate, smallest, world) if smallest is not None else None
        return name_cause(cases, bank.values(), without, shown)


@contextmanager
def further_cases(cell: Cell, failing: Problem, world: World, settings: Settings) -> Generator[Iterator[Case]]:
    """Opens the worlds of other layouts, and gives the cases that may tell why a kernel disagrees.

    Args:
        cell: as for ``diagnose``, and so are the others.
        failing: the first problem on which it disagreed.
        world: where its ranks run.
        settings: its seed chooses the problems.
    """
    layouts = telling_layouts(cell.layout) if cell.world == "simulated" else [cell.layout]
    with ExitStack() as worlds:
        open_worlds = {cell.layout: world}
        for layout in layouts:
            if layout != cell.layout:
                made = make_world(cell.world, layout, min(settings.timeout, _PATIENCE), cell.device)
                worlds.callback(made.close)
                open_worlds[layout] = made
        yield cases_like(cell, failing, layouts, open_worlds, settings)


def telling_layouts(layout: Layout) -> list[Layout]:
    """Returns a layout, and others that split the same axes into other numbers of ranks.

    A factor dp and a factor tp are the same number where dp = tp, and a factor 2 where both are 2.
    """
    split, found = layout.axes, [layout]
    for number, axis in enumerate(split):
        sizes = {**dict.fromkeys(split, 2), axis: 3 if layout.sizes[axis] != 3 or len(split) > 1 else 2}
        other = Layout(**sizes)
        if other not in found and other.ranks <= MAX_RANKS and number < 2:
            found.append(other)
    return found


def cases_like(
    cell: Cell, failing: Problem, layouts: Sequence[Layout], worlds: Mapping[Layout, World], settings: Settings
) -> Iterator[Case]:
    """Yields cases: problems of the deck, and each again as the problem that failed, as a mistake
    may show with its options or its split of the vocabulary alone, with logits as large, or where
    nothing is trained. Every second of these has its own numbers, as two mistakes may be one at a
    weight of 0.5.

    The layouts take turns, so that few cases have many batches: on one batch, many mistakes are
    alike. At last each problem has been on each layout.
    """
    deck, splits = deck_of(cell.candidate, cell.dtype, settings.seed), splits_of(cell.candidate)
    entries = [entry for entry in deck.entries if not is_large(entry.bound.problem)]
    trains_nothing = _trains_nothing(cell, failing)
    alike = [
        _like(failing, entry, cell, own_numbers=number % 2 == 1, trains_nothing=trains_nothing)
        for number, entry in enumerate(entries)
    ]
    in_turn = list(chain.from_iterable(zip(entries, alike, strict=True)))
    for turn, (number, each) in product(range(len(layouts)), enumerate(in_turn)):
        again = number % 2
        layout = layouts[(turn + number // 2 + again) % len(layouts)]
        split = failing.vocab_split if again else ""
        found = deck.on(layout, splits, [each])
        for placed in sorted(found, key=lambda one: one.problem.vocab_split != split)[:1]:
            padding = max(placed.problem.pad_to_multiple, failing.pad_to_multiple)
            problem = replace(placed.problem, pad_to_multiple=padding)
            yield Case(cell.candidate, problem, worlds[layout], placed.entry.bound)


def _like(failing: Problem, entry: Entry, cell: Cell, *, own_numbers: bool, trains_nothing: bool) -> Entry:
    spec, options = cell.candidate.spec, dict(failing.options)
    if own_numbers:
        own = entry.bound.problem.options
        given = {o.name: (options.get(o.name, o.default), own.get(o.name, o.default)) for o in spec.options}
        numbers = {name: x for name, (of_failing, x) in given.items() if _is_weight(of_failing) and _is_weight(x)}
        mixed = {name: x for name, x in (options | numbers).items() if x != spec.supported_options[name].default}
        options = options if spec.conflict(mixed) else mixed
    bias = failing.bias and entry.bound.problem.vocab > 1  # that of a single row has no gradient
    problem = replace(entry.bound.problem, options=options, scenario=failing.scenario, bias=bias)
    problem = replace(problem, cotangent=failing.cotangent)
    if trains_nothing:
        problem = replace(problem, masks=("none",) * len(problem.masks))
    if not own_numbers:
        problem = replace(problem, logit_std=failing.logit_std, label_boost=failing.label_boost)
    return replace(entry, bound=BoundProblem(cell.candidate.spec, problem), drawn=problem)


def _trains_nothing(cell: Cell, problem: Problem) -> bool:
    """Returns whether no token is trained. Few problems are like that, but for these."""
    counts = BoundProblem(cell.candidate.spec, problem).batch.known
    return "valid_tokens" in counts and not int(counts["valid_tokens"])


def _is_weight(value: object) -> bool:
    """Returns whether a value is a number other than 0, which often switches something off."""
    return isinstance(value, float) and value != 0.0
