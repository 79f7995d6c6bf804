# SPDX-License-Identifier: Apache-2.0
"""Imports the files and modules that users name, and notes which candidates they make.

A file is imported as if it were run: it finds its neighbours. It can't end this process, and what
goes wrong is an error of one line.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from traceback import extract_tb
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from lossgate.base.errors import UsageError
from lossgate.base.spelling import shown

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
        with _guarded(location):
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
        with _neighbours_of(file.resolve()), _guarded(str(file)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# What goes wrong


class _Ended(BaseException):
    """In place of the end of this process."""


@contextmanager
def _guarded(location: str) -> Generator[None]:
    """Has the end of an import be an error of the file, whatever ended it.

    ``os._exit`` would end this process at once, with an exit code that is a verdict: 0 is AGREE.
    So it raises meanwhile, but not where lossgate itself calls it, as at a signal, nor in a process
    that the file has forked.

    Raises:
        UsageError: if the import raised anything but ``KeyboardInterrupt``, or called ``os._exit``.
    """
    process, own_exit = os.getpid(), os._exit

    def refuse(status: int = 0) -> NoReturn:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if os.getpid() != process or caller.partition(".")[0] == "lossgate":
            own_exit(status)
        raise _Ended(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    except (KeyboardInterrupt, UsageError):
        raise
    except BaseException as error:
        raise UsageError(f"{location}: can't be imported: {_problem(location, error)}") from error
    finally:
        os._exit = own_exit


def _problem(location: str, error: BaseException) -> str:
    """Returns what an import raised, where, and what to do."""
    message, at = " ".join(str(error).split()), _line(location, error)
    if isinstance(error, _Ended | SystemExit):
        call = message if isinstance(error, _Ended) else f"sys.exit({shown(error.code)})"
        return f"it calls {call}{at}; put that under if __name__ == '__main__'"
    if "relative import with no known parent" in message:
        module = ".".join(Path(location).with_suffix("").parts[-2:])
        return f"{message}; name the module, as {module}, not its file"
    if isinstance(error, SyntaxError):  # its message names the line
        at = ""
    stem = Path(location).stem
    if isinstance(error, ImportError) and location.endswith(".py") and stem == (error.name or "").split(".")[0]:
        at += f"; {stem} is this file itself, because no package of that name is installed"
    return f"{type(error).__name__}: {message}{at}"


def _line(location: str, error: BaseException) -> str:
    """Returns the line of the file that was at work, in words."""
    at = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename).name == Path(location).name]
    return f", on line {at[-1]}" if at else ""


# Neighbours

_NEIGHBOURS: dict[str, Path] = {}
"""The modules that loaded files have imported from their own folders, and these folders."""


@contextmanager
def _neighbours_of(file: Path) -> Generator[None]:
    """Lets a file import its neighbours, as if it were run.

    A file of candidates steps aside for an installed package of its name: ``liger_kernel.py``
    imports what it wraps, and not itself. It is loaded by its path, and needs no name.
    """
    folder = file.parent
    _forget_namesakes(folder)
    before, steps_aside = set(sys.modules), _StepsAside(file)
    sys.meta_path.insert(0, steps_aside)  # pyright: ignore[reportArgumentType]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.meta_path.remove(steps_aside)  # pyright: ignore[reportArgumentType]
        sys.path.remove(str(folder))
        _NEIGHBOURS.update({top: folder for top in map(_top, set(sys.modules) - before) if _stands_in(folder, top)})


class _StepsAside:
    """Finds the installed package of a name that a file of candidates in a folder has, too."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        namesake = self._file.parent / f"{name}.py"
        if path is not None or not namesake.is_file() or not self._has_candidates(namesake):
            return None
        elsewhere = [entry for entry in sys.path if Path(entry).resolve() != self._file.parent]
        return PathFinder.find_spec(name, elsewhere, target)

    def _has_candidates(self, file: Path) -> bool:
        return file == self._file or b"lossgate" in file.read_bytes()


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


# Candidates that a module makes


_KEY = "__lossgate_made__"
_DEPTH = 3
"""How deep lists and mappings of a module are looked into. One may hold itself."""


class MadeCandidate(NamedTuple):
    """A candidate, and the line of the module at which it was made."""

    what: Any
    line: int


def note_made(what: Any) -> None:
    """Notes a candidate in the module whose import makes it, if there is one.

    So one in a list, of a loop or of a class is found as well as one at the top of the file, and
    one that a second function of its name replaces is not lost without a word.

    The program that was started is none: its candidates are made anew whenever it calls a function.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "__main__":
        return
    spec = frame.f_globals.get("__spec__")  # another one if the module is imported again
    known = frame.f_globals.get(_KEY)
    if known is None or known[0] is not spec:
        known = frame.f_globals[_KEY] = (spec, [])
    known[1].append(MadeCandidate(what, frame.f_lineno))


def made_in(module: ModuleType) -> list[MadeCandidate]:
    """Returns what a module made while it was imported, in order."""
    return list(vars(module).get(_KEY, (None, ()))[1])


def kept_in(module: ModuleType) -> Iterator[Any]:
    """Yields the values that a module has names for, and those in its lists and mappings."""
    for name, value in [*vars(module).items()]:
        if name != _KEY:
            yield from _values(value, _DEPTH)


def _values(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth and type(value) in (list, tuple, dict, set, frozenset):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _values(each, depth - 1)
