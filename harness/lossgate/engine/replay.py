# SPDX-License-Identifier: Apache-2.0
"""Judges the problems of a failure file again."""

from dataclasses import dataclass

from lossgate.cases.case import Case
from lossgate.declaration.loading import load_candidates
from lossgate.engine.case_result import run_case
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.failure_files import FailureFile, FrozenCase
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import pooled_disagreements
from lossgate.errors import UsageError
from lossgate.properties import find_property
from lossgate.worlds import make_world


@dataclass(frozen=True)
class Replayed:
    """What came of a replay."""

    disagrees: bool
    lines: tuple[str, ...]
    """The outcome and how it compares with the file, in words."""
    exact: bool
    """Every statistic is the number in the file."""


def replay_failure(
    failure: FailureFile, candidate: str | None = None, world: str | None = None, timeout: float | None = None
) -> Replayed:
    """Judges the problems of a failure file again.

    Args:
        failure: what the file holds.
        candidate: judge this one (``file.py:name``) in place of the one that the file names.
        world: where ranks run; by default where the problems failed.
        timeout: seconds after which ranks that do not go on count as hanging.

    Raises:
        UsageError: if the candidate cannot be read, or does not fit the problem; or the timeout is
            not positive.
        WorldLost: if a rank is gone and cannot be replaced.
    """
    found = load_candidates(candidate or failure.candidate)
    if len(found) != 1:
        raise UsageError(f"{candidate or failure.candidate}: {len(found)} candidates in it; name one, as file.py:name")
    problem = failure.examples[0].problem
    kind, held_to = world or failure.world, find_property(failure.property)
    cell = Cell(found[0], problem.layout, problem.dtype, held_to, kind, failure.device)
    settings = Settings() if timeout is None else Settings(timeout=timeout)
    ranks = make_world(kind, cell.layout, settings.timeout, cell.device)
    try:
        cases = [run_case(Case(cell.candidate, frozen.problem, ranks), cell.property) for frozen in failure.examples]
    finally:
        ranks.close()
    failing = next((case for case in cases if not case.agrees), None)
    reasons = failing.findings if failing else pooled_disagreements(cases) if failure.pooled else ()
    exact = [FrozenCase.of(case).statistics for case in cases] == [frozen.statistics for frozen in failure.examples]
    lines = [f"{Verdict.DISAGREE if reasons else Verdict.AGREE}  {cell.candidate.name}  {cell.dtype}  {cell.layout}"]
    lines += [f"  {line}" for reason in reasons for line in reason.splitlines()]
    lines.append(f"  on: {len(cases)} problems, pooled" if failure.pooled else f"  on: {problem.describe()}")
    if exact:
        lines.append("  every statistic is the one in the file")
    elif candidate is None:
        written_with = ", ".join(f"{k} {v}" for k, v in failure.versions.items())
        lines.append(f"  statistics differ from those in the file, which was written with {written_with}")
    return Replayed(bool(reasons), tuple(lines), exact)
