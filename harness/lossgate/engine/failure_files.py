# SPDX-License-Identifier: Apache-2.0
"""Failure files, written and read: a disagreement, frozen for ``lossgate replay``."""

import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import msgspec
import torch

import lossgate
from lossgate.declaration.candidate import Candidate
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import CellResult
from lossgate.errors import UsageError
from lossgate.problems.problem import Problem


@dataclass(frozen=True, kw_only=True)
class FrozenCase:
    """One problem, and the statistics of each output on it."""

    problem: Problem
    statistics: dict[str, dict[str, float]]
    findings: tuple[str, ...]
    symptoms: tuple[str, ...]

    @classmethod
    def of(cls, case: CaseResult) -> "FrozenCase":
        statistics = {str(comparison.output): dict(comparison.values) for comparison in case.comparisons}
        return cls(problem=case.problem, statistics=statistics, findings=case.findings, symptoms=case.symptoms)


@dataclass(frozen=True, kw_only=True)
class FailureFile:
    """What a failure file holds: one problem, or all problems that disagree only when pooled."""

    candidate: str
    """``file.py:name``, the file relative to the working folder if it lies below. One that is read
    again also names it from another working folder."""
    reasons: tuple[str, ...]
    examples: tuple[FrozenCase, ...]
    pooled: bool
    """The examples disagree only when pooled."""
    versions: dict[str, str]
    property: str = "agreement"
    """What the candidate was held to."""
    world: str = "simulated"
    """Where its ranks ran."""
    device: str = "cpu"
    """Where they computed."""
    symptoms: tuple[str, ...] = ()
    """What disagreed in any problem of the cell. The smallest problem may show less."""
    earlier: tuple[Problem, ...] = ()
    """The problems that are run first, if the example disagrees only after them."""


def versions() -> dict[str, str]:
    """Returns the versions that numbers may depend on."""
    return {
        "lossgate": lossgate.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def read_failure(file: Path) -> FailureFile:
    """Reads a failure file.

    Raises:
        UsageError: if the file cannot be read or is no failure file.
    """
    try:
        values = msgspec.json.decode(file.read_bytes())
        failure = msgspec.convert(values, FailureFile)
        failure = replace(failure, candidate=_located(failure.candidate, file))
        for example in values["examples"]:
            Problem.from_builtins(example["problem"])  # refuses fields that it does not know
        for problem in values.get("earlier", ()):
            Problem.from_builtins(problem)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from None
    except (msgspec.MsgspecError, UsageError) as error:
        raise UsageError(
            f"{file} is no failure file of this version of lossgate: {error}. Run verify again to write a new one"
        ) from None
    if not failure.examples:
        raise UsageError(f"{file} holds no example; expected at least one")
    return failure


def write_failure(result: CellResult, folder: Path) -> Path:
    """Writes the failure of a cell into a folder, under a name that contains the cell, and returns
    the file.

    Raises:
        UsageError: if the folder cannot be written.
    """
    cases = (result.failure,) if result.failure is not None else result.cases
    held_to = result.cell.property.name if result.failure is None else result.failure.held_to
    content = FailureFile(
        candidate=_portable(result.cell.candidate),
        reasons=result.reasons,
        examples=tuple(FrozenCase.of(case) for case in cases),
        pooled=result.failure is None,
        versions=versions(),
        property=held_to,
        world=result.cell.world,
        device=result.cell.device,
        symptoms=result.symptoms,
        earlier=result.failure.earlier if result.failure is not None else (),
    )
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    cell = result.cell
    stem = re.sub(r"[^\w=,.-]", "_", f"failure-{cell.candidate.name}-{held_to}-{cell.dtype}-{cell.layout}")
    file = folder / f"{stem}-{crc32(text):08x}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(text)
        partial.rename(file)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror}; choose another folder with --failures") from None
    return file


def _located(candidate: str, file: Path) -> str:
    """Returns a candidate that was named in the folder of a run, for this working folder.

    A failure file lies below the folder of its run, unless the user chose another place.
    """
    location, _, name = candidate.rpartition(":")
    if not location.endswith(".py") or Path(location).is_file():
        return candidate
    return next((f"{at / location}:{name}" for at in file.resolve().parents if (at / location).is_file()), candidate)


def _portable(candidate: Candidate) -> str:
    file, _, name = candidate.source.rpartition(":")
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"
