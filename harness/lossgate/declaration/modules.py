# SPDX-License-Identifier: Apache-2.0
"""Imports the files and modules that users name."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from zlib import crc32

from lossgate.base.errors import UsageError
from lossgate.declaration.guarded import guarded
from lossgate.declaration.neighbours import neighbours_of

_before: list[Callable[[str], object]] = []
"""What is called with each location before it is imported."""


@contextmanager
def before_imports(check: Callable[[str], object]) -> Generator[None]:
    """Has a function called with each file or module before it is imported here.

    Args:
        check: may raise an error, so that it is not imported.
    """
    _before.append(check)
    try:
        yield
    finally:
        _before.remove(check)


def load_module(location: str) -> ModuleType:
    """Loads a file ending in .py, once, or a module by its name.

    Raises:
        UsageError: if there is none, or it can't be imported.
    """
    if location.endswith(".py"):
        return _load_file(Path(location))
    if not all(part.isidentifier() for part in location.split(".")):
        raise _no_such_module(location)
    if location not in sys.modules:
        _check(location)
    try:
        with guarded(location):
            module = importlib.import_module(location)
    except UsageError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name and _is_of(location, missing.name):
            raise _no_such_module(location) from None
        raise
    if getattr(module, "__file__", None) is None and Path(location).is_dir():
        raise _no_such_module(location)
    return module


def _check(location: str) -> None:
    for check in _before:
        check(location)


def _no_such_module(location: str) -> UsageError:
    path = Path(location)
    if path.is_dir():
        inside = sorted(path.glob("*.py"))
        way_out = f"name the files in it, such as {inside[0]}" if inside else "it has no file that ends in .py"
        return UsageError(f"{location}: no such module, and the folder of that name is none; {way_out}")
    if path.is_file():
        return UsageError(f"{location} does not end in .py; save the kernels in a file that does, with their own spec")
    return UsageError(
        f"{location}: no such module; expected a file ending in .py or an importable module{_unsearched(location)}"
    )


def _is_of(location: str, module: str) -> bool:
    """Returns whether a module is one that a location names: itself, or a package of it."""
    return f"{location}.".startswith(f"{module}.")


def _unsearched(location: str) -> str:
    """Returns what to do about a module of the working folder, where Python need not look."""
    top, here = location.partition(".")[0], Path.cwd()
    if not ((here / top).is_dir() or (here / f"{top}.py").is_file()) or {"", str(here)} & {*sys.path}:
        return ""
    return f". {top} lies in this folder, where Python does not look: install it, or set PYTHONPATH=."


def _load_file(file: Path) -> ModuleType:
    if file.is_dir():
        raise UsageError(f"{file}: is a folder; name a file in it")
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    name = f"lossgate_candidates_{file.stem}_{crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    _check(str(file))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with neighbours_of(file.resolve()), guarded(str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
