# SPDX-License-Identifier: Apache-2.0
"""Problems that promise to tell one choice of an option from another.

Which do hangs neither on the kernel nor, but for sizes, on the layout, and takes long to find out: so they are drawn once in a process for
all cells that want them. They are the same in every process, whatever was asked before.
"""

from dataclasses import dataclass, replace
from zlib import crc32

from hypothesis.errors import Unsatisfiable

from lossgate.adequacy.kills import differences
from lossgate.adequacy.option_mutants import Contrast
from lossgate.cases.strategies import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.problems.problem import Problem

DRAWN, _WANTED, _BATCH = 80, 1, 10
"""Most problems that are drawn for one contrast, twice as many if the other choice changes nothing on any of them; and how many are wanted."""

DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""How much the other choice must change a result for a problem to be promising."""


@dataclass(frozen=True)
class Promising:
    """For one contrast."""

    problems: tuple[Problem, ...]
    idle: bool
    """The other choice changed no result of any problem that was drawn: there is nothing to tell."""

    def on(self, layout: Layout) -> list[Problem]:
        """The same problems on other ranks, but for those that are too small for them."""
        return [fitting for problem in self.problems if (fitting := _on(problem, layout)) is not None]


_FOUND: dict[str, Promising] = {}
_DRAWN: dict[str, list[Problem]] = {}


def promising(candidate: Candidate, dtype: str, seed: int, contrast: Contrast, focus: Contrast | None) -> Promising:
    """focus: whose choice the problems are to have, None for any; those of a choice are drawn but once for all its contrasts."""
    given = (
        candidate.spec,
        candidate.head,
        candidate.axes,
        sorted(candidate.supports.items()),
        sorted(candidate.tiles.items()),
    )
    key = f"{given} {candidate.differentiable} {dtype} {seed} {focus.choice if focus else ''}"
    told = f"{key} {contrast}"
    if told not in _FOUND:
        _FOUND[told] = _find(candidate, dtype, key, contrast, focus)
    return _FOUND[told]


def _find(candidate: Candidate, dtype: str, key: str, contrast: Contrast, focus: Contrast | None) -> Promising:
    found, drawn, changed = list[Problem](), 0, False
    for batch in range(2 * DRAWN // _BATCH):
        if len(found) >= _WANTED or (drawn >= DRAWN and changed):
            break
        for problem in _draw(candidate, dtype, f"{key} {batch}", focus):
            difference = differences(contrast, problem)[contrast.side]
            drawn, changed = drawn + 1, changed or difference > 0
            if difference >= DIFFERENCE[dtype]:
                found.append(problem)
    return Promising(tuple(found[:_WANTED]), idle=drawn >= 2 * DRAWN and not changed)


def _draw(candidate: Candidate, dtype: str, key: str, focus: Contrast | None) -> list[Problem]:
    if key not in _DRAWN:
        layout = Layout(
            **dict.fromkeys(candidate.axes, 2)
        )  # more than one rank of each, so that there is something on each
        try:
            _DRAWN[key] = sample_problems(candidate, layout, dtype, _BATCH, crc32(key.encode()), focus)
        except Unsatisfiable:  # nothing goes with that choice
            _DRAWN[key] = []
    return _DRAWN[key]


def _on(problem: Problem, layout: Layout) -> Problem | None:
    try:
        return replace(problem, layout=layout)
    except UsageError:
        return None
