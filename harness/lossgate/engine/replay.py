# SPDX-License-Identifier: Apache-2.0
"""Judges the problems of a failure file again."""

from dataclasses import dataclass
from pathlib import Path

from lossgate.cases.examine import examine
from lossgate.declaration.loading import load_candidates
from lossgate.engine.cell import Cell, Verdict, biases
from lossgate.engine.failure_files import Frozen, read_failure
from lossgate.errors import UsageError
from lossgate.worlds import SimulatedWorld


@dataclass(frozen=True)
class Replayed:
    """What came of it, and how it compares with the file, in words."""

    disagrees: bool
    lines: tuple[str, ...]
    exact: bool
    """Every statistic is the number in the file."""


def replay_failure(file: Path, candidate: str | None = None) -> Replayed:
    """Replay ``file`` with the candidate that it names, or another: ``file.py:name``."""
    failure = read_failure(file)
    found = load_candidates(candidate or failure.candidate)
    if len(found) != 1:
        raise UsageError(f"--candidate {candidate}: {len(found)} candidates in it; name one, as file.py:name")
    problem = failure.examples[0].problem
    if problem.dtype not in found[0].precision:
        raise UsageError(f"candidate {found[0].name!r} takes no {problem.dtype}, which the problem needs")
    cell = Cell(found[0], problem.layout, problem.dtype)
    world = SimulatedWorld(problem.layout)
    try:
        examined = [examine(cell.candidate, frozen.problem, world) for frozen in failure.examples]
    finally:
        world.close()
    failing = next((e for e in examined if not e.agrees), None)
    reasons = failing.findings if failing else biases(examined) if failure.pooled else ()
    exact = [Frozen.of(e).statistics for e in examined] == [frozen.statistics for frozen in failure.examples]
    lines = [f"{Verdict.DISAGREE if reasons else Verdict.AGREE}  {cell.candidate.name}  {cell.dtype}  {cell.layout}"]
    lines += [f"  {line}" for reason in reasons for line in reason.splitlines()]
    lines.append(f"  on: {len(examined)} problems together" if failure.pooled else f"  on: {problem.describe()}")
    if exact:
        lines.append("  every statistic is the one in the file")
    elif candidate is None:
        lines.append(
            f"  statistics differ from those in the file, written with {', '.join(f'{k} {v}' for k, v in failure.versions.items())}"
        )
    return Replayed(bool(reasons), tuple(lines), exact)
