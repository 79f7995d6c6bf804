# SPDX-License-Identifier: Apache-2.0
"""Looks for the cause of a disagreement, on problems of the cell's deck."""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice, product
from math import ceil
from typing import Any

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
from lossgate.specs.spec import Spec
from lossgate.worlds import make_world
from lossgate.worlds.base import World

_PATIENCE = 10.0
"""Seconds after which a rank is taken to hang if its layout is not that of the cell."""

_ALIKE = 24
"""The most cases that are made like the failing problem."""
_LONGER = (1.25, 1.0, 1.5, 1.1)
"""The factors by which their sequences are longer, in turn."""
_LONGEST = 2**14
"""If the failing problem has more tokens, no such cases are made, because they take long."""


def diagnose(
    cell: Cell,
    failing: Problem,
    world: World,
    settings: Settings,
    without: Collection[str] = (),
) -> Diagnosis:
    """Returns the diagnosis of a disagreement.

    Args:
        cell: a cell of agreement.
        failing: the first problem on which the kernel disagreed, before it was shrunk.
        world: where the ranks run.
        settings: the seed chooses the problems.
        without: names of mistakes to leave out.
    """
    bank = counterfactuals_of(cell.candidate.spec, cell.candidate.head)
    with further_cases(cell, failing, world, settings) as cases:
        return name_cause(cases, bank.values(), without, _alike(cell, failing, world))


def _alike(cell: Cell, failing: Problem, world: World) -> Iterator[Case]:
    """Yields cases like a failing problem, as long as it or longer, with other numbers.

    What is wrong must show on sequences of other lengths, too: a chunk that is lost has as many
    tokens as the problem gives it.
    """
    if failing.tokens > _LONGEST:
        return
    for number, longer in enumerate(islice(cycle(_LONGER), _ALIKE), start=1):
        lengths = tuple(ceil(length * longer) for length in failing.lengths)
        yield Case(cell.candidate, replace(failing, lengths=lengths, seed=failing.another_seed(number)), world)


@contextmanager
def further_cases(cell: Cell, failing: Problem, world: World, settings: Settings) -> Generator[Iterator[Case]]:
    """Opens the worlds of further layouts, and gives the cases that may tell why a kernel
    disagrees.

    The arguments are those of ``diagnose``.
    """
    layouts = telling_layouts(cell.layout) if cell.world == "simulated" else [cell.layout]
    with ExitStack() as opened:
        worlds = {cell.layout: world}
        for layout in layouts:
            if layout != cell.layout:
                worlds[layout] = make_world(cell.world, layout, min(settings.timeout, _PATIENCE), cell.device)
                opened.callback(worlds[layout].close)
        yield cases_like(cell, failing, layouts, worlds, settings)


def telling_layouts(layout: Layout) -> list[Layout]:
    """Returns a layout, and others that split the same axes into other numbers of ranks.

    These tell mistakes apart: a factor dp and a factor tp are the same number if dp = tp, and so is
    a factor 2 if both are 2.
    """
    split, found = layout.axes, [layout]
    for axis in split[:2]:
        sizes = dict.fromkeys(split, 2)
        if layout.sizes[axis] != 3 or len(split) > 1:
            sizes[axis] = 3
        other = Layout(**sizes)
        if other not in found and other.ranks <= MAX_RANKS:
            found.append(other)
    return found


def cases_like(
    cell: Cell, failing: Problem, layouts: Sequence[Layout], worlds: Mapping[Layout, World], settings: Settings
) -> Iterator[Case]:
    """Yields cases that may tell mistakes apart. Each problem of the deck comes twice.

    First it comes as it is. Then it comes in the likeness of the failing problem, with its options,
    its split of the vocabulary, and no trained token if that has none, because the mistake may show
    only then. Of these, every second one keeps its own weights, because two mistakes may look alike
    at some weights, such as 0.5. The rest get logits as large as those of the failing problem.

    The layouts take turns, so that the first few cases have many batches: on one batch, many
    mistakes look alike. In the end each problem has come on each layout.
    """
    deck, splits = deck_of(cell.candidate, cell.dtype, settings.seed), splits_of(cell.candidate)
    entries = [entry for entry in deck.entries if not is_large(entry.bound.problem)]
    trains_nothing = _trains_nothing(cell, failing)
    pairs = [
        (entry, _like(failing, entry, cell, own_numbers=number % 2 == 1, trains_nothing=trains_nothing))
        for number, entry in enumerate(entries)
    ]
    for turn, (number, pair) in product(range(len(layouts)), enumerate(pairs)):
        for of_pair, entry in enumerate(pair):
            layout = layouts[(turn + number + of_pair) % len(layouts)]
            split = failing.vocab_split if of_pair == 1 else ""
            found = sorted(deck.on(layout, splits, [entry]), key=lambda one: one.problem.vocab_split != split)
            if found:
                placed = found[0]
                padding = max(placed.problem.pad_to_multiple, failing.pad_to_multiple)
                problem = replace(placed.problem, pad_to_multiple=padding)
                yield Case(cell.candidate, problem, worlds[layout], placed.entry.bound)


def _like(failing: Problem, entry: Entry, cell: Cell, *, own_numbers: bool, trains_nothing: bool) -> Entry:
    """Returns an entry whose problem resembles the failing one. Its sequences and sizes stay.

    If ``own_numbers``, it also keeps its weights, the size of its logits, and which outputs have an
    upstream gradient.
    """
    spec, own, options = cell.candidate.spec, entry.bound.problem, failing.options
    if own_numbers:
        options = _with_weights(options, own.options, spec)
    bias = failing.bias and own.vocab > 1  # the bias of a single row has no gradient
    problem = replace(own, options=options, scenario=failing.scenario, bias=bias)
    if trains_nothing:
        problem = replace(problem, masks=("none",) * len(problem.masks))
    if not own_numbers:
        problem = replace(
            problem, logit_std=failing.logit_std, label_boost=failing.label_boost, cotangent=failing.cotangent
        )
    return replace(entry, bound=BoundProblem(spec, problem), drawn=problem)


def _with_weights(options: Mapping[str, Any], others: Mapping[str, Any], spec: Spec) -> Mapping[str, Any]:
    """Returns options with the weights of other options, if these are valid together."""
    mixed = dict(options)
    for option in spec.options:
        weight = others.get(option.name, option.default)
        if _is_weight(weight) and _is_weight(options.get(option.name, option.default)):
            mixed[option.name] = weight
    mixed = {name: value for name, value in mixed.items() if value != spec.supported_options[name].default}
    return options if spec.conflict(mixed) else mixed


def _trains_nothing(cell: Cell, problem: Problem) -> bool:
    """Returns whether no token of a problem is trained. Few problems are like that."""
    counts = BoundProblem(cell.candidate.spec, problem).batch.known
    return "valid_tokens" in counts and not int(counts["valid_tokens"])


def _is_weight(value: object) -> bool:
    """Returns whether a value is a weight: a number other than 0. Often 0 switches a term off."""
    return isinstance(value, float) and value != 0.0
