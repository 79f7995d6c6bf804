# SPDX-License-Identifier: Apache-2.0
"""Judges the problems of a failure file again."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lossgate.counted import counted
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import has_source, load_candidates
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.failure_files import FailureFile, FrozenCase, versions
from lossgate.engine.fresh import run_in_child
from lossgate.engine.jobs import run_cases
from lossgate.engine.settings import Settings
from lossgate.engine.verdict import pooled_disagreements
from lossgate.errors import UsageError
from lossgate.problems.problem import Problem
from lossgate.properties import find_property


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
    found, problem = candidate_of(failure, candidate), failure.examples[0].problem
    kind, held_to = world or failure.world, find_property(failure.property)
    cell = Cell(found, problem.layout, problem.dtype, held_to, kind, failure.device)
    settings = Settings() if timeout is None else Settings(timeout=timeout)
    problems = [frozen.problem for frozen in failure.examples]
    cases = _run(cell, [*failure.earlier, *problems], settings.timeout)[-len(problems) :]
    failing = next((case for case in cases if not case.agrees), None)
    reasons = failing.findings if failing else pooled_disagreements(cases) if failure.pooled else ()
    exact = [FrozenCase.of(case).statistics for case in cases] == [frozen.statistics for frozen in failure.examples]
    word, of = Verdict.DISAGREE if reasons else Verdict.AGREE, "" if held_to.needs_adequacy else f"  {held_to}"
    lines = [f"{word}  {cell.candidate.name}{of}  {cell.dtype}  {cell.layout}"]
    lines += [f"  {line}" for reason in reasons for line in reason.splitlines()]
    lines.append(f"  on: {len(cases)} problems, pooled" if failure.pooled else f"  on: {problem.describe()}")
    lines += [f"    {line}" for line in failing.side_by_side] if failing else []
    if failure.earlier:
        lines.append(f"  after {counted(len(failure.earlier), 'call')} with other problems, in the same process")
    if exact:
        lines.append("  every statistic is the one in the file")
    elif candidate is None:
        lines.append(f"  statistics differ from those in the file{_why(failure)}")
    return Replayed(bool(reasons), tuple(lines), exact)


def candidate_of(failure: FailureFile, candidate: str | None = None) -> Candidate:
    """Loads the candidate of a failure file.

    Args:
        failure: what the file holds.
        candidate: the one to take in its place.

    Raises:
        UsageError: if it cannot be read, or its spec has not the options of the problems.
    """
    location = failure.candidate.rpartition(":")[0]
    if candidate is None and location.endswith(".py") and not Path(location).is_file():
        raise UsageError(
            f"{location}: no such file, neither here nor above the failure file; replay it in the folder where it was "
            "verified, or name the candidate: --candidate file.py:name"
        )
    found = load_candidates(candidate or failure.candidate)
    if len(found) != 1:
        raise UsageError(f"{candidate or failure.candidate}: {len(found)} candidates in it; name one, as file.py:name")
    _check_options(found[0], failure)
    return found[0]


def _run(cell: Cell, problems: Sequence[Problem], timeout: float) -> list[CaseResult]:
    """Runs problems in a process of their own, if that can load the candidate and the property."""
    if cell.world == "simulated" and has_source(cell.candidate):
        with suppress(UsageError):
            return run_in_child(cell, problems, timeout)
    return run_cases(cell, problems, timeout)


def _why(failure: FailureFile) -> str:
    """Returns what may have changed the statistics since the file was written."""
    if failure.versions == versions():
        return ": the kernel, its spec or the machine is another one"
    return f", which was written with {', '.join(f'{name} {version}' for name, version in failure.versions.items())}"


def _check_options(candidate: Candidate, failure: FailureFile) -> None:
    """Refuses problems with options that the spec of today does not have.

    Raises:
        UsageError: if there is one.
    """
    for frozen in failure.examples:
        if frozen.problem.spec != candidate.spec.name:
            continue  # the message is then about that
        try:
            candidate.spec.bind(frozen.problem.options)
        except UsageError as error:
            raise UsageError(
                f"{error}. Spec {candidate.spec.name!r} has changed since the failure file was written; "
                "run verify again to write a new one"
            ) from None
