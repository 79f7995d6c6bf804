# SPDX-License-Identifier: Apache-2.0
"""Evidence: one JSON line per cell, for a gate to read."""

import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import msgspec

from lossgate.engine.cell import CellResult
from lossgate.engine.failure_files import versions
from lossgate.engine.run import CellFinished, Event
from lossgate.errors import UsageError
from lossgate.problems.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a cell. Statistics are shares of their limits: over 1 is a disagreement."""

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
    finding: str | None
    reasons: tuple[str, ...]
    problems: int
    comparisons: int
    worst: dict[str, dict[str, float]]
    """By output and statistic."""
    mde: dict[str, float | None]
    """Least error in scale that the pool would have seen, by output; null if it could see none."""
    planted: dict[str, float]
    """Share of the planted errors that were seen, by kind."""
    branches: tuple[str, ...]
    missing_branches: tuple[str, ...]
    untold_options: tuple[str, ...]
    """Choices of options that no problem would have told from another; see ``specs.contrasts``."""
    idle_options: tuple[str, ...]
    """Those between which there was nothing to tell, in any problem that the candidate can be given."""
    problem: Problem | None
    seed: int
    seconds: float
    time: str
    commit: str | None
    host: str
    versions: dict[str, str]


class EvidenceFile:
    """Appends to a file; opened at once, so that a path that can't be written is known before the work is done."""

    def __init__(self, path: Path, seed: int) -> None:
        self._seed = seed
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise UsageError(f"--evidence {path}: can't be written: {error.strerror}") from None

    def __call__(self, event: Event) -> None:
        if isinstance(event, CellFinished):
            self._file.write(evidence_line(event.result, self._seed) + b"\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def evidence_line(result: CellResult, seed: int) -> bytes:
    """The JSON of one cell, on one line."""
    return msgspec.json.encode(_evidence(result, seed))


def _evidence(result: CellResult, seed: int) -> Evidence:
    cell, candidate = result.cell, result.cell.candidate
    return Evidence(
        candidate=candidate.name,
        source=candidate.source,
        spec=candidate.spec,
        head=candidate.head,
        property=cell.property,
        layout=str(cell.layout),
        dtype=cell.dtype,
        world="simulated",
        device="cpu",
        verdict=result.verdict,
        finding=candidate.finding.name if candidate.finding else None,
        reasons=result.reasons,
        problems=len(result.examined),
        comparisons=result.comparisons,
        worst=_worst(result),
        mde={p.output: p.mde if p.problems else None for p in result.pooled},
        planted=result.power,
        branches=tuple(sorted(result.branches)),
        missing_branches=result.missing_branches,
        untold_options=result.untold,
        idle_options=result.idle,
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
    for comparison in (c for e in result.examined for c in e.comparisons):
        own = worst.setdefault(comparison.output, {})
        for name, share in comparison.excess.items():
            own[name] = max(own.get(name, 0.0), share)
    return worst


@cache
def _commit() -> str | None:
    """Of the working folder, if it is a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
