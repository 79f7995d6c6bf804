# SPDX-License-Identifier: Apache-2.0
"""Lets a file import the others of its folder, and the package that it is named like."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_NEIGHBOURS: dict[str, Path] = {}
"""The modules that loaded files have imported from their own folders, and these folders."""


@contextmanager
def neighbours_of(file: Path) -> Generator[None]:
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
