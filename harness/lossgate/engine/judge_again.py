# SPDX-License-Identifier: Apache-2.0
"""What the problems of a failure file show now, in a cell of today."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lossgate.base.errors import UsageError
from lossgate.cases.large import size_of
from lossgate.declaration.loading import has_source
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell
from lossgate.engine.crash import run_in_child
from lossgate.engine.failure_files import FailureFile
from lossgate.engine.jobs import run_cases
from lossgate.engine.verdict import pooled_disagreements, pooled_outputs
from lossgate.problems.problem import Problem

_BYTES = 32
"""Of each number of the largest tensor: float64, with its gradient and two tensors on the way."""


@dataclass(frozen=True)
class Again:
    """What the problems of a failure file show now."""

    cases: Sequence[CaseResult]
    """One for each example."""
    wrong: tuple[str, ...]
    """What is wrong, in words; nothing if the kernel agrees."""
    symptoms: Collection[str]
    """In what, as symptoms name it."""

    @property
    def failing(self) -> CaseResult | None:
        """The first case that disagrees by itself, and not only pooled."""
        return next((case for case in self.cases if not case.agrees), None)


def judge_again(failure: FailureFile, cell: Cell, timeout: float) -> Again:
    """Judges the problems of a failure file in a cell.

    Raises:
        UsageError: if a problem does not suit the candidate, or is too large for this machine.
        WorldLost: as for ``replay_failure``.
    """
    for problem in failure.problems():
        _check_memory(problem)
    cases = _run(cell, failure.problems(), timeout)[-len(failure.examples) :]
    failing = next((case for case in cases if not case.agrees), None)
    return Again(cases, *_wrong(failure, cases, failing))


def _wrong(
    failure: FailureFile, cases: Sequence[CaseResult], failing: CaseResult | None
) -> tuple[tuple[str, ...], Collection[str]]:
    """Returns what is wrong, in words; and in what, as symptoms name it."""
    if failing is not None:
        return failing.findings, failing.symptoms
    if not failure.pooled:
        return (), ()
    pooled = pooled_outputs(cases)
    return pooled_disagreements(pooled), [str(one.output) for one in pooled if not one.agrees]


def _run(cell: Cell, problems: Sequence[Problem], timeout: float) -> list[CaseResult]:
    """Runs problems in a process of their own, if that can load the candidate and the property."""
    if cell.world == "simulated" and has_source(cell.candidate):
        with suppress(UsageError):
            return run_in_child(cell, problems, timeout)
    return run_cases(cell, problems, timeout)


def _check_memory(problem: Problem) -> None:
    """Refuses a problem that this machine can't hold. Its process would be ended, as if by the
    kernel.

    Raises:
        UsageError: with what it needs.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := _BYTES * size_of(problem)) > machine:
        raise UsageError(
            f"the problem has tensors of {size_of(problem):,} numbers, which need about {needed / 2**30:.0f} GiB with "
            f"their gradients, and this machine has {machine / 2**30:.0f} GiB; replay it on a larger one"
        )
