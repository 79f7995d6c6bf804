# SPDX-License-Identifier: Apache-2.0
"""Imports the files and modules that users name."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from zlib import crc32

from lossgate.errors import UsageError


def load_module(location: str) -> ModuleType:
    """Loads a file ending in .py, once, or a module by its name.

    Raises:
        UsageError: if there is none, or it can't be imported.
    """
    if location.endswith(".py"):
        return _load_file(Path(location))
    if not all(part.isidentifier() for part in location.split(".")) and not Path(location).is_file():
        raise UsageError(f"{location}: no such module; expected a file ending in .py or an importable module")
    try:
        return importlib.import_module(location)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and location.startswith(error.name):
            if Path(location).exists() and not Path(location).is_dir():
                raise UsageError(
                    f"{location} does not end in .py; save the kernels in a file that does, with their own spec"
                ) from None
            raise UsageError(
                f"{location}: no such module; expected a file ending in .py or an importable module"
                f"{_unsearched(location)}"
            ) from None
        raise _import_error(location, error) from error


def _unsearched(location: str) -> str:
    """Returns what to do about a module of the working folder, where Python need not look."""
    top, here = _top(location), Path.cwd()
    if not ((here / top).is_dir() or (here / f"{top}.py").is_file()) or {"", str(here)} & {*sys.path}:
        return ""
    return f". {top} lies in this folder, where Python does not look: install it, or set PYTHONPATH=."


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
    folder = file.resolve().parent
    _forget_namesakes(folder)
    sys.modules[name] = module
    before = set(sys.modules)
    sys.path.insert(0, str(folder))  # it can import its neighbours, as if it were run
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_error(str(file), error) from error
    finally:
        sys.path.remove(str(folder))
        _NEIGHBOURS.update({top: folder for top in map(_top, set(sys.modules) - before) if _stands_in(folder, top)})
    return module


_NEIGHBOURS: dict[str, Path] = {}
"""The modules that loaded files have imported from their own folders, and these folders."""


def _forget_namesakes(folder: Path) -> None:
    """Forgets the neighbours of other files that have the name of one in this folder.

    Else its files would get those: the spec in the losses.py of another folder, say.
    """
    for name in [*sys.modules]:
        top = _top(name)
        is_here = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if _NEIGHBOURS.get(top, folder) != folder and is_here:
            del sys.modules[name]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _stands_in(folder: Path, top: str) -> bool:
    """Returns whether a module or package is one of a folder's own, not of a folder below it."""
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and Path(file).resolve() in (folder / f"{top}.py", folder / top / "__init__.py")


def _import_error(location: str, error: BaseException) -> UsageError:
    if isinstance(error, UsageError):
        return error
    if "relative import with no known parent" in str(error):
        module = ".".join(Path(location).with_suffix("").parts[-2:])
        return UsageError(f"{location}: can't be imported: {error}; name the module, as {module}, not its file")
    return UsageError(f"{location}: can't be imported: {type(error).__name__}: {error}")
