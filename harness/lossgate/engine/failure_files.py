# SPDX-License-Identifier: Apache-2.0
"""Writes and reads failure files. Each freezes a disagreement for ``lossgate replay``."""

import importlib.util
import platform
import re
import sys
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
"""The most lines about causes in a file."""
_LENGTH = 2000
"""The most characters of such a line."""
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
    """The content of a failure file: one problem, or all problems if only pooled ones disagree."""

    candidate: str
    """``file.py:name`` or ``package.module:name``. A file below the working folder is written
    relative to it, and is found again from other working folders when the failure file is read."""
    reasons: tuple[str, ...]
    examples: tuple[FrozenCase, ...]
    pooled: bool
    """Whether the examples disagree only when pooled."""
    versions: dict[str, str]
    property: str = "agreement"
    """The name of the property that the candidate was held to."""
    world: str = "simulated"
    """Where the ranks ran."""
    device: str = "cpu"
    """Where the ranks computed."""
    symptoms: tuple[str, ...] = ()
    """The symptoms in all problems of the cell. The smallest problem may show fewer."""
    causes: Annotated[tuple[_Line, ...], msgspec.Meta(max_length=_LINES)] = ()
    """The cause that verify found and what to do, or else the places where outputs are wrong. They
    are only shown, but for a known failure: the cause says what is set aside."""
    earlier: tuple[Problem, ...] = ()
    """The problems that must run first for the example to disagree."""
    checksum: str = ""
    """The checksum of the problems when the file was written."""

    def problems(self) -> tuple[Problem, ...]:
        """All problems, in the order in which they are run."""
        return (*self.earlier, *(frozen.problem for frozen in self.examples))

    def is_as_written(self) -> bool:
        """Whether nobody has edited the problems since the file was written."""
        return self.checksum == _checksum(self.problems())


def _checksum(problems: Iterable[Problem]) -> str:
    text = "\n".join(problem.to_json() for problem in problems)
    return f"{crc32(text.encode()):08x}"


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
        UsageError: if the file cannot be read, or is no failure file.
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
    """Refuses unknown fields, and causes that can't be printed in a line.

    Unknown fields are refused because without them the replay might be of something else.

    Raises:
        UsageError: if the content has such a field or line.
    """
    _check_known(values, FailureFile)
    for example in values["examples"]:
        _check_known(example, FrozenCase)
    for line in values.get("causes", ()):
        if not line.isprintable():
            raise UsageError(f"field causes has the line {shown(line)}; expected printable characters only")
    for problem in (*values.get("earlier", ()), *(example["problem"] for example in values["examples"])):
        Problem.from_builtins(problem)


def _check_known(values: Iterable[str], made: type[FailureFile | FrozenCase]) -> None:
    known = [own.name for own in fields(made)]
    for name in values:
        if name not in known:
            raise UsageError(f"unknown field {shown(name)}; {nearest(name, known)}")


def write_failure(result: CellResult, folder: Path) -> Path:
    """Writes the failure of a cell into a folder, and returns the file. Its name contains the cell.

    Raises:
        OSError: if the folder cannot be written.
    """
    failure = result.failure
    if failure is None:
        cases, held_to, earlier = result.cases, result.cell.property.name, ()
    else:
        cases, held_to, earlier = (failure,), failure.held_to, failure.earlier
    record = result.record
    causes = record.causes if record.cause else record.causes[1:]
    content = FailureFile(
        candidate=_portable(result.cell.candidate),
        reasons=result.reasons,
        examples=tuple(FrozenCase.of(case) for case in cases),
        pooled=failure is None,
        versions=versions(),
        property=held_to,
        world=result.cell.world,
        device=result.cell.device,
        symptoms=record.symptoms,
        causes=tuple(map(_line, causes[:_LINES])),
        earlier=earlier,
        checksum=_checksum([*earlier, *(case.problem for case in cases)]),
    )
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    file = folder / f"{_stem(result.cell, held_to)}-{crc32(text):08x}.json"
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(text)
    partial.rename(file)  # so that nobody reads half a file
    return file


def _line(text: str) -> str:
    """Returns a text as a line that ``read_failure`` accepts. Texts of a user's spec may have any
    characters.
    """
    return "".join(character if character.isprintable() else " " for character in text)[:_LENGTH]


def _stem(cell: Cell, held_to: str) -> str:
    """Returns the beginning of the names of the failure files of a cell and a property."""
    return re.sub(r"[^\w=,.-]", "_", f"failure-{cell.candidate.name}-{held_to}-{cell.dtype}-{cell.layout}")


def failure_files_of(cell: Cell, held_to: str, folder: Path) -> list[Path]:
    """Returns the files in a folder that ``write_failure`` wrote for a cell and a property, and
    that nobody has edited or renamed since.

    Files of another candidate with the same name are left out.
    """
    names = re.compile(rf"{re.escape(_stem(cell, held_to))}-([0-9a-f]{{8}})\.json")
    found: list[Path] = []
    for file in sorted(folder.glob("failure-*.json")):
        match = names.fullmatch(file.name)
        if match is not None and _is_of(file, match[1], cell, held_to):
            found.append(file)
    return found


def _is_of(file: Path, crc: str, cell: Cell, held_to: str) -> bool:
    """Returns whether a file has its checksum, and is of a cell and a property."""
    try:
        if f"{crc32(file.read_bytes()):08x}" != crc:
            return False
        failure = read_failure(file)
    except (OSError, UsageError):
        return False
    problem = failure.examples[0].problem
    of_file = failure.property, failure.world, failure.device, problem.layout, problem.dtype
    if of_file != (held_to, cell.world, cell.device, cell.layout, cell.dtype):
        return False
    return absolute_source(failure.candidate) == absolute_source(cell.candidate.source)


def _located(candidate: str, file: Path) -> str:
    """Returns the name of a candidate for this working folder.

    The name in the file is relative to the folder of the run. The failure file lies below that
    folder, unless the user chose another place. So the source is looked for in all folders above.
    """
    location, _, name = candidate.rpartition(":")
    try:
        if not location.endswith(".py") or Path(location).is_file():
            return candidate
        for folder in file.resolve().parents:
            if (folder / location).is_file():
                return f"{folder / location}:{name}"
    except (OSError, ValueError):  # no file system has such a name
        raise UsageError(
            f"{file}: candidate={shown(candidate)}; expected file.py:name or package.module:name"
        ) from None
    return candidate


def _portable(candidate: Candidate) -> str:
    """Returns the source of a candidate, relative to the working folder if it lies below."""
    location, _, name = candidate.source.rpartition(":")
    path = Path(location)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{name}"


_LOSSGATE = Path(__file__).resolve().parents[1]


def check_trusted(failure: FailureFile, file: Path) -> None:
    """Refuses a failure file that names code outside the working folder. Nothing is imported.

    Raises:
        UsageError: if the candidate is outside the working folder, or in an installed module.
    """
    if (place := _outside(failure.candidate)) is not None:
        raise UsageError(
            f"{file} names the candidate {shown(failure.candidate)}, whose code is in {place}, outside the working "
            "folder; replaying it runs that code: add --trust if you trust the file, or name the candidate: "
            "--candidate file.py:name"
        )


def needs_trust(source: str) -> bool:
    """Returns whether a failure file of a candidate is replayed only with ``--trust``."""
    return _outside(source) is not None


def _outside(source: str) -> Path | None:
    """Returns the file of a candidate if it is outside the working folder; else None.

    Packages in a virtual environment within the working folder count as outside, because the user
    did not write them. lossgate itself counts as inside, because its code runs anyway.
    """
    place = _place(source.rpartition(":")[0] or source)
    here, installed = Path.cwd().resolve(), Path(sys.prefix).resolve()
    if place is None or place.is_relative_to(_LOSSGATE):
        return None
    is_installed = installed != here and place.is_relative_to(installed) and installed.is_relative_to(here)
    return place if is_installed or not place.is_relative_to(here) else None


def _place(location: str) -> Path | None:
    """Returns the file of a location, or that of its package; None if there is no code to run."""
    if location.endswith(".py"):
        return Path(location).resolve()
    try:
        # Looking for a submodule would import its package, so only the package is looked for.
        spec = importlib.util.find_spec(location.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is not None and spec.has_location:
        return Path(spec.origin).resolve()
    folders = spec.submodule_search_locations or ()  # of a package without __init__.py
    return next((Path(folder).resolve() for folder in folders), None)
