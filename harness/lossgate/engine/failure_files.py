# SPDX-License-Identifier: Apache-2.0
"""Failure files, written and read: a disagreement, frozen for ``lossgate replay``."""

import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any
from zlib import crc32

import msgspec
import torch

import lossgate
from lossgate.base.errors import UsageError
from lossgate.base.spelling import nearest, shown
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.loading import absolute_source
from lossgate.engine.case_result import CaseResult
from lossgate.engine.cell import Cell, CellResult
from lossgate.problems.problem import Problem

_LINES = 10
"""So many lines a file may have of causes."""
_LENGTH = 2000
"""So many characters a line of them may have."""
_Line = Annotated[str, msgspec.Meta(max_length=_LENGTH)]


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
    causes: Annotated[tuple[_Line, ...], msgspec.Meta(max_length=_LINES)] = ()
    """What explains it, and what to do about it, as verify said it. They are shown, and nothing
    is judged by them."""
    earlier: tuple[Problem, ...] = ()
    """The problems that are run first, if the example disagrees only after them."""
    checksum: str = ""
    """Of the problems, when the file was written."""

    def problems(self) -> tuple[Problem, ...]:
        """All problems, in the order in which they are run."""
        return (*self.earlier, *(frozen.problem for frozen in self.examples))

    def is_as_written(self) -> bool:
        """Whether the candidate disagreed on just these problems: nobody has edited them since."""
        return self.checksum == _checksum(self.problems())


def _checksum(problems: Iterable[Problem]) -> str:
    return f"{crc32(chr(10).join(problem.to_json() for problem in problems).encode()):08x}"


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
        _check_fields(values)
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _unreadable(file, f"byte {error.start} is no UTF-8") from None
    except RecursionError:
        raise _unreadable(file, "its values are nested too deeply") from None
    except (msgspec.MsgspecError, UsageError) as error:
        raise _unreadable(file, str(error)) from None
    if not failure.examples:
        raise UsageError(f"{file} holds no example; expected at least one")
    return replace(failure, candidate=_located(failure.candidate, file))


def _unreadable(file: Path, why: str) -> UsageError:
    return UsageError(
        f"{file} is no failure file of this version of lossgate: {why}. Run verify again to write a new one"
    )


def _check_fields(values: Any) -> None:
    """Refuses fields that are not known, because leaving them out would replay something else; and
    lines that are no lines.

    Raises:
        UsageError: if there is one.
    """
    _check_known(values, FailureFile)
    for example in values["examples"]:
        _check_known(example, FrozenCase)
    for line in values.get("causes", ()):
        if not line.isprintable():
            raise UsageError(f"causes: {shown(line)}; expected characters that can be printed in a line")
    for problem in (*values.get("earlier", ()), *(example["problem"] for example in values["examples"])):
        Problem.from_builtins(problem)


def _check_known(values: Iterable[str], made: type[FailureFile | FrozenCase]) -> None:
    known = [own.name for own in fields(made)]
    for name in values:
        if name not in known:
            raise UsageError(f"unknown field {shown(name)}; {nearest(name, known)}")


def write_failure(result: CellResult, folder: Path) -> Path:
    """Writes the failure of a cell into a folder, under a name that contains the cell, and returns
    the file.

    Raises:
        UsageError: if the folder cannot be written.
    """
    cases = (result.failure,) if result.failure is not None else result.cases
    held_to = result.cell.property.name if result.failure is None else result.failure.held_to
    earlier = result.failure.earlier if result.failure is not None else ()
    content = FailureFile(
        candidate=_portable(result.cell.candidate),
        reasons=result.reasons,
        examples=tuple(FrozenCase.of(case) for case in cases),
        pooled=result.failure is None,
        versions=versions(),
        property=held_to,
        world=result.cell.world,
        device=result.cell.device,
        symptoms=result.record.symptoms,
        causes=tuple(map(_line, result.record.causes[:_LINES])),
        earlier=earlier,
        checksum=_checksum([*earlier, *(case.problem for case in cases)]),
    )
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    file = folder / f"{_stem(result.cell, held_to)}-{crc32(text):08x}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(text)
        partial.rename(file)
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror}; choose another folder with --failures") from None
    return file


def _line(text: str) -> str:
    """Returns a text as a line that can be read again: words of a user's spec may hold anything."""
    return "".join(own if own.isprintable() else " " for own in text)[:_LENGTH]


def _stem(cell: Cell, held_to: str) -> str:
    """Returns how the names of the failure files of a cell and a property begin."""
    return re.sub(r"[^\w=,.-]", "_", f"failure-{cell.candidate.name}-{held_to}-{cell.dtype}-{cell.layout}")


def failure_files_of(cell: Cell, held_to: str, folder: Path) -> list[Path]:
    """Returns the files in a folder that ``write_failure`` wrote of a cell and a property, and that
    nobody has edited or renamed since.

    Another candidate may have the same name. Its files say where it is, and are left out.
    """
    names = re.compile(rf"{re.escape(_stem(cell, held_to))}-([0-9a-f]{{8}})\.json")
    found = (
        (file, match[1]) for file in sorted(folder.glob("failure-*.json")) if (match := names.fullmatch(file.name))
    )
    return [file for file, crc in found if _is_of(file, crc, cell, held_to)]


def _is_of(file: Path, crc: str, cell: Cell, held_to: str) -> bool:
    try:
        if f"{crc32(file.read_bytes()):08x}" != crc:
            return False
        failure = read_failure(file)
    except (OSError, UsageError):
        return False
    problem = failure.examples[0].problem
    return (failure.property, failure.world, failure.device, problem.layout, problem.dtype) == (
        *(held_to, cell.world, cell.device, cell.layout, cell.dtype),
    ) and absolute_source(failure.candidate) == absolute_source(cell.candidate.source)


def _located(candidate: str, file: Path) -> str:
    """Returns a candidate that was named in the folder of a run, for this working folder.

    A failure file lies below the folder of its run, unless the user chose another place.
    """
    location, _, name = candidate.rpartition(":")
    try:
        if not location.endswith(".py") or Path(location).is_file():
            return candidate
        return next(
            (f"{at / location}:{name}" for at in file.resolve().parents if (at / location).is_file()), candidate
        )
    except (OSError, ValueError):  # no file system has such a name
        raise UsageError(
            f"{file}: candidate={shown(candidate)}; expected file.py:name or package.module:name"
        ) from None


def _portable(candidate: Candidate) -> str:
    file, _, name = candidate.source.rpartition(":")
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{name}"
