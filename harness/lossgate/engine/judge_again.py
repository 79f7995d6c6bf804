# SPDX-License-Identifier: Apache-2.0
"""Judges the problems of a failure file in a cell of today."""

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
"""Bytes for each number of the largest tensor: float64, with its gradient and two temporaries."""


@dataclass(frozen=True)
class Again:
    """The results on the problems of a failure file."""

    cases: Sequence[CaseResult]
    """One result for each example of the file."""
    wrong: tuple[str, ...] = ()
    """What is wrong, in words. Empty if the kernel agrees."""
    symptoms: Collection[str] = ()
    """The symptoms of ``wrong``."""
    failing: CaseResult | None = None
    """The first case that disagrees by itself, and not only pooled."""


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
    if failing is not None:
        return Again(cases, failing.findings, failing.symptoms, failing)
    if not failure.pooled:
        return Again(cases)
    pooled = pooled_outputs(cases)
    return Again(cases, pooled_disagreements(pooled), [str(one.output) for one in pooled if not one.agrees])


def _run(cell: Cell, problems: Sequence[Problem], timeout: float) -> list[CaseResult]:
    """Runs problems in a new process, if that can load the candidate and the property."""
    if cell.world == "simulated" and has_source(cell.candidate):
        with suppress(UsageError):  # the new process may not know the property
            return run_in_child(cell, problems, timeout)
    return run_cases(cell, problems, timeout)


def _check_memory(problem: Problem) -> None:
    """Refuses a problem that this machine can't hold.

    The system would end the process for want of memory, and that would look like a crash of the
    kernel.

    Raises:
        UsageError: if the problem needs more memory than the machine has.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (needed := _BYTES * size_of(problem)) > machine:
        raise UsageError(
            f"the problem has tensors of {size_of(problem):,} numbers, which need about {needed / 2**30:.0f} GiB with "
            f"their gradients, and this machine has {machine / 2**30:.0f} GiB; replay it on a larger machine"
        )
