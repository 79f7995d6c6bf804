# SPDX-License-Identifier: Apache-2.0
"""Writes evidence: one JSON line per cell."""

import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import msgspec

from lossgate.engine.cell import CellResult
from lossgate.engine.events import CellFinished, Event
from lossgate.engine.failure_files import versions
from lossgate.errors import UsageError
from lossgate.problems.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known about a cell.

    Statistics are shares of their limits: over 1 is a disagreement.
    """

    candidate: str
    source: str
    spec: str
    head: str
    property: str
    layout: str
    dtype: str
    world: str
    device: str
    verdict: str
    known_failure: str | None
    reasons: tuple[str, ...]
    problems: int
    comparisons: int
    worst: dict[str, dict[str, float]]
    """The largest share of its limit, by output and statistic."""
    mde: dict[str, float | None]
    """The minimum detectable effect of each output, pooled over problems; null if no problem says
    anything about it."""
    planted: dict[str, float]
    """The share of the planted errors that were rejected, by kind."""
    covered: tuple[str, ...]
    """The coverage goals that were reached."""
    missing_goals: tuple[str, ...]
    surviving_mutants: tuple[str, ...]
    """The option mutants that no problem killed."""
    equivalent_mutants: tuple[str, ...]
    """Those that no problem can kill."""
    problem: Problem | None
    seed: int
    seconds: float
    time: str
    commit: str | None
    host: str
    versions: dict[str, str]


class EvidenceFile:
    """Appends to a file.

    It is opened at once, so that a path that cannot be written is reported before the work is done.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self._seed = seed
        try:
            self._file = path.open("ab", buffering=0)  # each line is whole, whatever ends the process
        except OSError as error:
            raise UsageError(f"--evidence {path}: can't be written: {error.strerror}") from None

    def __call__(self, event: Event) -> None:
        if isinstance(event, CellFinished):
            self._file.write(evidence_line(event.result, self._seed) + b"\n")

    def close(self) -> None:
        self._file.close()


def evidence_line(result: CellResult, seed: int) -> bytes:
    """Returns the JSON of one cell, on one line."""
    return msgspec.json.encode(_evidence(result, seed))


def _evidence(result: CellResult, seed: int) -> Evidence:
    cell, candidate = result.cell, result.cell.candidate
    return Evidence(
        candidate=candidate.name,
        source=candidate.source,
        spec=candidate.spec.name,
        head=candidate.head,
        property=cell.property.name,
        layout=str(cell.layout),
        dtype=cell.dtype,
        world=cell.world,
        device=cell.device,
        verdict=result.verdict,
        known_failure=candidate.known_failure.name if candidate.known_failure else None,
        reasons=result.reasons,
        problems=len(result.cases),
        comparisons=result.comparisons,
        worst=_worst(result),
        mde={str(p.output): p.mde if p.problems else None for p in result.pooled},
        planted=result.power,
        covered=tuple(sorted(result.covered)),
        missing_goals=result.missing_goals,
        surviving_mutants=result.surviving,
        equivalent_mutants=result.equivalent,
        problem=result.failure.problem if result.failure else None,
        seed=seed,
        seconds=round(result.seconds, 3),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        host=platform.node(),
        versions=versions(),
    )


def _worst(result: CellResult) -> dict[str, dict[str, float]]:
    worst: dict[str, dict[str, float]] = {}
    for comparison in (c for case in result.cases for c in case.comparisons):
        own = worst.setdefault(str(comparison.output), {})
        for name, share in comparison.shares.items():
            own[name] = max(own.get(name, 0.0), share)
    return worst


@cache
def _commit() -> str | None:
    """Returns the commit of the working folder, if it is a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
