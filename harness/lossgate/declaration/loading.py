# SPDX-License-Identifier: Apache-2.0
"""Finds candidates in files and modules."""

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from zlib import crc32

from lossgate.declaration.candidate import Candidate
from lossgate.errors import UsageError
from lossgate.losses import find_spec


def load_candidates(target: str) -> list[Candidate]:
    """Every candidate of ``file.py``, ``package.module``, or one: ``file.py:name``, ``package.module:name``.

    In the order of definition, each checked against its spec, and with ``target`` as its source.
    """
    place, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    module = _load(place)
    found: dict[str, Candidate] = {}
    for candidate in vars(module).values():
        if isinstance(candidate, Candidate) and found.setdefault(candidate.name, candidate) is not candidate:
            raise UsageError(
                f"{place}: two candidates are named {candidate.name!r}; tell them apart by candidate(name=...)"
            )
    if not found:
        raise UsageError(f"{place}: no candidate in it; decorate a kernel with @lossgate.candidate(...)")
    if name and name not in found:
        raise UsageError(f"{place}: no candidate named {name!r}; it has {', '.join(found)}")
    chosen = [
        replace(candidate, source=f"{place}:{candidate.name}")
        for candidate in found.values()
        if name in ("", candidate.name)
    ]
    for candidate in chosen:
        find_spec(candidate.spec).check(candidate)
    return chosen


def _load(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _load_file(Path(place))
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and place.startswith(error.name):
            raise UsageError(
                f"{place}: no such module; expected a file ending in .py or an importable module"
            ) from None
        raise _import_error(place, error) from error


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    name = f"lossgate_candidates_{file.stem}_{crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))  # its neighbours, as if it were run
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_error(str(file), error) from error
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module


def _import_error(place: str, error: BaseException) -> UsageError:
    return (
        error
        if isinstance(error, UsageError)
        else UsageError(f"{place}: can't be imported: {type(error).__name__}: {error}")
    )
