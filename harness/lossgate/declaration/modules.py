# SPDX-License-Identifier: Apache-2.0
"""Imports the files and modules that users name, and notes which candidates they make.

A file can import its neighbours, as if it were run. If it fails, or tries to end this process, that
is reported as an error of one line.
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

StandIn = Callable[[], ModuleType]
"""Returns a module that has the candidates of a location, and that is not the location itself."""

_before: list[Callable[[str], StandIn | None]] = []
"""Functions that are called with each location before it is imported."""
_stand_ins: dict[str, StandIn | None] = {}
"""What these functions have returned, by location."""


@contextmanager
def before_imports(check: Callable[[str], StandIn | None]) -> Generator[None]:
    """Calls a function with each file or module before this process imports it.

    Args:
        check: the function. It may raise an error to prevent the import.
    """
    _before.append(check)
    try:
        yield
    finally:
        _before.remove(check)
        _stand_ins.clear()


def load_module(location: str, *, here: bool = True) -> ModuleType:
    """Loads a file ending in .py, once, or a module by its name.

    Args:
        location: the file or module.
        here: whether this process must import it. Else what stands in for it will do.

    Raises:
        UsageError: if there is no such file or module, or it can't be imported.
    """
    if location.endswith(".py"):
        return _load_file(Path(location), here=here)
    if not all(part.isidentifier() for part in location.split(".")):
        raise _no_such_module(location)
    if location not in sys.modules and (stand_in := _check(location)) is not None and not here:
        return stand_in()
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


def _check(location: str) -> StandIn | None:
    """Calls the functions of ``before_imports``, once. Returns what stands in for a location."""
    for check in _before:
        if location not in _stand_ins:
            _stand_ins[location] = check(location)
    return _stand_ins.get(location)


def _no_such_module(location: str) -> UsageError:
    path = Path(location)
    if path.is_dir():
        inside = sorted(path.glob("*.py"))
        way_out = f"name the files in it, such as {inside[0]}" if inside else "it has no file that ends in .py"
        return UsageError(f"{location}: no such module, and the folder of that name is no package; {way_out}")
    if path.is_file():
        return UsageError(f"{location} does not end in .py; save the kernels, with their own spec, in a file that does")
    return UsageError(
        f"{location}: no such module; expected a file ending in .py or an importable module{_unsearched(location)}"
    )


def _is_of(location: str, module: str) -> bool:
    """Returns whether a module is the one at a location, or a package that contains it."""
    return f"{location}.".startswith(f"{module}.")


def _unsearched(location: str) -> str:
    """Returns advice about a module in this folder if Python does not look there; else ""."""
    top, here = location.partition(".")[0], Path.cwd()
    is_here = (here / top).is_dir() or (here / f"{top}.py").is_file()
    is_searched = "" in sys.path or str(here) in sys.path
    if not is_here or is_searched:
        return ""
    return f". {top} lies in this folder, where Python does not look: install it, or set PYTHONPATH=."


def _load_file(file: Path, *, here: bool) -> ModuleType:
    if file.is_dir():
        raise UsageError(f"{file}: is a folder; name a file in it")
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    name = f"lossgate_candidates_{file.stem}_{crc32(str(file.resolve()).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if (stand_in := _check(str(file))) is not None and not here:
        return stand_in()
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
    """Raised by ``os._exit`` while a file is imported, so that this process does not end."""


@contextmanager
def _guarded(location: str) -> Generator[None]:
    """Turns whatever ends an import into an error about the file.

    ``os._exit`` would end this process at once, and its exit code would be read as a verdict: 0 is
    AGREE. So it raises an exception while a file is imported, unless lossgate itself calls it, as
    at a signal, or a process that the file has forked. A file that catches this exception is
    imported to its end.

    Raises:
        UsageError: if the import raised an exception other than ``KeyboardInterrupt``.
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
    """Describes the exception that an import raised, with its line and the way out."""
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
    """Returns in words the line of a file that led to an error; "" if no line of it did."""
    frames = extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(location).name]
    return f", on line {lines[-1]}" if lines else ""


# Neighbours

_NEIGHBOURS: dict[str, Path] = {}
"""The modules that loaded files have imported from their own folders, and these folders."""


@contextmanager
def _neighbours_of(file: Path) -> Generator[None]:
    """Lets a file import its neighbours, as if it were run.

    A file of candidates may have the name of the package that it wraps. In ``liger_kernel.py``,
    ``import liger_kernel`` gives the installed package. The file itself is loaded by its path.
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
        imported = {_top(name) for name in set(sys.modules) - before}
        _NEIGHBOURS.update({top: folder for top in imported if _stands_in(folder, top)})


class _StepsAside:
    """A finder that prefers an installed package to a file of candidates with the same name."""

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
    """Forgets modules of other folders whose name a module in this folder has, too.

    Otherwise a file in this folder that imports ``losses``, for example, would get the losses.py of
    another folder.
    """
    for name in [*sys.modules]:
        top = _top(name)
        is_here = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
        if _NEIGHBOURS.get(top, folder) != folder and is_here:
            del sys.modules[name]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _stands_in(folder: Path, top: str) -> bool:
    """Returns whether a module or package lies directly in a folder."""
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and Path(file).resolve() in (folder / f"{top}.py", folder / top / "__init__.py")


# Candidates that a module makes


_KEY = "__lossgate_made__"
_DEPTH = 3
"""How many levels of nested lists and mappings are searched. A list may hold itself."""


class MadeCandidate(NamedTuple):
    """A candidate, and the line of the module at which it was made."""

    what: Any
    line: int


def note_made(what: Any) -> None:
    """Notes a candidate in the module whose import makes it, if an import does.

    So lossgate also finds candidates that a loop or a class makes, and it reports two functions of
    the same name. The main program does not count as a module here, because its functions may make
    the same candidates anew.
    """
    frame: FrameType | None = sys._getframe(2)  # where the decorator is applied
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "__main__":
        return
    spec = frame.f_globals.get("__spec__")  # it is a new object if the module is imported again
    known = frame.f_globals.get(_KEY)
    if known is None or known[0] is not spec:
        known = frame.f_globals[_KEY] = (spec, [])
    known[1].append(MadeCandidate(what, frame.f_lineno))


def made_in(module: ModuleType) -> list[MadeCandidate]:
    """Returns the candidates that a module made while it was imported, in order."""
    _, made = vars(module).get(_KEY, (None, ()))
    return list(made)


def kept_in(module: ModuleType) -> Iterator[Any]:
    """Yields the named values of a module, and the values in its lists and mappings."""
    for name, value in [*vars(module).items()]:
        if name != _KEY:
            yield from _values(value, _DEPTH)


def _values(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth and type(value) in (list, tuple, dict, set, frozenset):
        parts = value.values() if isinstance(value, Mapping) else value
        for part in parts:
            yield from _values(part, depth - 1)
