# SPDX-License-Identifier: Apache-2.0
"""Which known mistakes the problems of a configuration show. No kernel is run.

A run of a right kernel tries certain problems in each cell. On each of them the reference with a
mistake takes the place of the kernel: would the judge reject what it gives?
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from time import process_time

import torch
from torch import Tensor

from lossgate.cases.oracle import Oracle
from lossgate.cases.placed_problem import PlacedProblem
from lossgate.counterfactuals.bank import counterfactuals_of
from lossgate.counterfactuals.counterfactual import Counterfactual
from lossgate.counterfactuals.setting import Setting
from lossgate.declaration.candidate import Candidate
from lossgate.diagnosis.observed import same
from lossgate.engine.cell import Cell
from lossgate.engine.plan import plan
from lossgate.engine.search import Search
from lossgate.engine.settings import Settings
from lossgate.layout import Layout
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.specs.outputs import Output
from lossgate.worlds import make_world

_OF_METRICS = "metric"


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A mistake that changes an output, and that no problem shows."""

    name: str
    sentence: str
    layouts: tuple[Layout, ...]
    """Those on which it changes an output."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the cells of a candidate would have seen."""

    candidate: Candidate
    cells: int
    problems: int
    seen: Mapping[str, str]
    """The mistakes that a problem shows, and their sentences, by name."""
    unseen: tuple[Unseen, ...]
    unchanged: Mapping[str, str]
    """The mistakes that change nothing on any of the problems."""
    impossible: Mapping[str, str]
    """The mistakes that can't be made on any of them: they need other layouts, options or tiles."""
    seconds: float
    """CPU time."""


@dataclass
class _Tally:
    """What the cells so far say of the mistakes."""

    left: dict[str, Counterfactual]
    seen: dict[str, str] = field(default_factory=dict)
    changed: dict[str, dict[Layout, str]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    problems: int = 0


def audit(candidates: Iterable[Candidate], settings: Settings, *, metrics: bool = False) -> Iterator[Audit]:
    """Yields, for each candidate, which known mistakes its cells would have seen.

    It asks about what a kernel must give: the loss, other outputs that are declared differentiable,
    and gradients. Large problems and properties beside agreement are left out, and so are
    candidates with a known failure.

    Args:
        candidates: say which problems they can be given. They are not called.
        settings: the configuration.
        metrics: whether kernels return all metrics of their spec, and are asked about them.
    """
    cells = [cell for cell in plan(candidates, settings) if cell.property.needs_adequacy]
    known = groupby((cell for cell in cells if cell.candidate.known_failure is None), lambda cell: cell.candidate)
    for candidate, own in known:
        yield _of_candidate(candidate, list(own), settings, metrics=metrics)


def _of_candidate(candidate: Candidate, cells: list[Cell], settings: Settings, *, metrics: bool) -> Audit:
    start, threads = process_time(), torch.get_num_threads()
    spec = candidate.spec
    known = counterfactuals_of(spec, candidate.head)
    bank = {name: one for name, one in known.items() if metrics or one.kind != _OF_METRICS}
    returned = {spec.output(name) for name in (spec.outputs[0], *candidate.differentiable)}
    tally = _Tally(dict(bank))
    torch.set_num_threads(1)
    try:
        for cell in cells:
            for placed in _problems(cell, settings):
                tally.problems += 1
                given = placed.bound.dense.outputs(placed.bound.bound_spec) if metrics else {}
                _ask(candidate, placed, returned.union(o for o in given if o.kind == "metric"), tally)
    finally:
        torch.set_num_threads(threads)
    unseen = [
        Unseen(name=name, sentence=next(iter(where.values())), layouts=tuple(where))
        for name, where in tally.changed.items()
        if name not in tally.seen
    ]
    unchanged = [n for n in bank if n in tally.made and n not in tally.seen and n not in tally.changed]
    return Audit(
        candidate=candidate,
        cells=len(cells),
        problems=tally.problems,
        seen=tally.seen,
        unseen=tuple(unseen),
        unchanged={name: bank[name].words("an output") for name in unchanged},
        impossible={name: one.words("an output") for name, one in bank.items() if name not in tally.made},
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


def _ask(candidate: Candidate, placed: PlacedProblem, returned: Collection[Output], tally: _Tally) -> None:
    """Asks one problem about all mistakes that none has shown before."""
    oracle = Oracle(candidate, placed, returned)
    setting = Setting(placed, returned, candidate.tokens, candidate.tiles)
    asked = [*returned, *oracle.gradients]
    for name, one in list(tally.left.items()):
        outputs = one.run(setting)
        if outputs is None:
            continue
        tally.made.add(name)
        changed = [o for o in asked if o in outputs and not same(outputs[o], oracle.reference[o])]
        if not changed:
            continue
        sentence = one.words(" and ".join(map(str, changed)))
        tally.changed.setdefault(name, {}).setdefault(placed.problem.layout, sentence)
        if any(_is_rejected(o, outputs[o], oracle, candidate, placed.problem.dtype) for o in changed):
            tally.seen[name] = sentence
            del tally.left[name]


def _is_rejected(output: Output, result: Tensor, oracle: Oracle, candidate: Candidate, dtype: str) -> bool:
    if not bool(result.isfinite().all()):
        return True
    returned_in = dtype if output.kind == "gradient" else candidate.precision[dtype].dtype_of(output.name)
    return bool(oracle.rejects(output, result[None], TORCH_DTYPES[returned_in])[0])
