# SPDX-License-Identifier: Apache-2.0
"""Failure files: a disagreement, frozen so that ``lossgate replay`` shows it again, number for number."""

import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

import lossgate
from lossgate.cases.examine import Examination
from lossgate.errors import UsageError
from lossgate.problems.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """One problem, and the statistics of each output on it."""

    problem: Problem
    statistics: dict[str, dict[str, float]]
    findings: tuple[str, ...]
    symptoms: tuple[str, ...]

    @classmethod
    def of(cls, examination: Examination) -> "Frozen":
        statistics = {comparison.output: dict(comparison.values) for comparison in examination.comparisons}
        return cls(
            problem=examination.problem,
            statistics=statistics,
            findings=examination.findings,
            symptoms=examination.symptoms,
        )


@dataclass(frozen=True, kw_only=True)
class FailureFile:
    """What a failure file holds: one problem, or all those that disagree only together."""

    candidate: str
    """``file.py:name``, the file relative to the working folder if it lies below."""
    reasons: tuple[str, ...]
    examples: tuple[Frozen, ...]
    pooled: bool
    """The examples disagree only when pooled."""
    versions: dict[str, str]


def versions() -> dict[str, str]:
    return {
        "lossgate": lossgate.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def read_failure(file: Path) -> FailureFile:
    try:
        failure = msgspec.json.decode(file.read_bytes(), type=FailureFile)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{file} is no failure file: {error}") from None
    if not failure.examples:
        raise UsageError(f"{file} holds no example: expected at least one")
    return failure
