# SPDX-License-Identifier: Apache-2.0
"""Problems that are likely to kill an option mutant.

Which problems do depends neither on the kernel nor, but for sizes, on the layout, and takes long to
find out. So they are drawn once in a process for all cells that need them. They are the same in
every process, whatever was asked before.
"""

from dataclasses import dataclass, replace
from zlib import crc32

from hypothesis.errors import Unsatisfiable

from lossgate.adequacy.kills import score
from lossgate.adequacy.option_mutants import OptionMutant
from lossgate.cases.option_strategies import ForcedOption
from lossgate.cases.strategies import sample_problems
from lossgate.declaration.candidate import Candidate
from lossgate.errors import UsageError
from lossgate.layout import Layout
from lossgate.problems.problem import Problem
from lossgate.specs.spec import Spec

DRAWN, _WANTED, _BATCH = 80, 1, 10
"""The most problems that are drawn for one mutant (twice as many if it changes nothing on any of
them), how many killing ones are wanted, and how many are drawn at a time."""

LEAST_SCORE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""The score from which on a problem is likely to kill a mutant."""


@dataclass(frozen=True)
class KillingProblems:
    """The problems found for one mutant."""

    problems: tuple[Problem, ...]
    equivalent: bool
    """The mutant changed no result of any problem that was drawn: nothing can kill it."""

    def on(self, layout: Layout) -> list[Problem]:
        """Returns the problems on other ranks, without those that are too small for them."""
        return [fitting for problem in self.problems if (fitting := _on(problem, layout)) is not None]


_FOUND: dict[tuple[Spec, str], KillingProblems] = {}
_DRAWN: dict[tuple[Spec, str], list[Problem]] = {}
"""By the spec itself, as two specs may have one name, and by all else that problems depend on."""


def killing_problems(
    candidate: Candidate, dtype: str, seed: int, mutant: OptionMutant, target: ForcedOption | None
) -> KillingProblems:
    """Returns problems that are likely to kill a mutant.

    Args:
        candidate: whose declaration says which problems can be drawn.
        dtype: of its inputs.
        seed: another seed draws other problems.
        mutant: the mutant.
        target: the choice that all problems must have, None for any. They are drawn once for all
            mutants of a choice.
    """
    declared = (
        candidate.spec.name,
        candidate.head,
        candidate.axes,
        sorted(candidate.supports.items()),
        sorted(candidate.tiles.items()),
    )
    key = f"{declared} {candidate.differentiable} {dtype} {seed} {target or ''}"
    name = candidate.spec, f"{key} {mutant}"
    if name not in _FOUND:
        _FOUND[name] = _find(candidate, dtype, key, mutant, target)
    return _FOUND[name]


def _find(
    candidate: Candidate, dtype: str, key: str, mutant: OptionMutant, target: ForcedOption | None
) -> KillingProblems:
    found, drawn, changed = list[Problem](), 0, False
    for batch in range(2 * DRAWN // _BATCH):
        if len(found) >= _WANTED or (drawn >= DRAWN and changed):
            break
        for problem in _draw(candidate, dtype, f"{key} {batch}", target):
            change = score(mutant, problem, candidate.spec)
            drawn, changed = drawn + 1, changed or change > 0
            if change >= LEAST_SCORE[dtype]:
                found.append(problem)
    return KillingProblems(tuple(found[:_WANTED]), equivalent=drawn >= 2 * DRAWN and not changed)


def _draw(candidate: Candidate, dtype: str, key: str, target: ForcedOption | None) -> list[Problem]:
    name = candidate.spec, key
    if name not in _DRAWN:
        layout = Layout(**dict.fromkeys(candidate.axes, 2))  # several ranks of each axis, so that each has something
        try:
            _DRAWN[name] = sample_problems(candidate, layout, dtype, _BATCH, crc32(key.encode()), target)
        except Unsatisfiable:  # no valid options have that choice
            _DRAWN[name] = []
    return _DRAWN[name]


def _on(problem: Problem, layout: Layout) -> Problem | None:
    try:
        return replace(problem, layout=layout)
    except UsageError:
        return None
