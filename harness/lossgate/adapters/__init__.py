# SPDX-License-Identifier: Apache-2.0
"""Public loss kernels as candidates: a file for each library, which imports it when it is named.

    lossgate list adapters
    lossgate verify lossgate.adapters.liger

This file imports no library, and not torch either.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lossgate.base.errors import UsageError

CHECKOUTS = "LOSSGATE_CHECKOUTS"
"""The environment variable that names a folder with checkouts of libraries, each under the name of
what Python imports of it, such as nemo_rl."""
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library, and the versions of it whose entry points are known."""

    name: str
    """Of the adapter: ``lossgate.adapters.NAME``."""
    package: str
    """What pip installs; or the repository, if the library is no release."""
    module: str
    """What Python imports."""
    known: tuple[str, ...]
    """The versions with which the adapter was tried, the oldest first. No older one will do."""
    is_release: bool = True
    """Whether pip installs it by a version. If not, it is a checkout, and ``known`` has commits,
    and releases that were tried."""

    @property
    def installed(self) -> str | None:
        """The version that is installed, "a checkout" if it has none; None if there is none."""
        try:
            return version(self.package.rpartition("/")[2])
        except PackageNotFoundError:
            return "a checkout" if PathFinder.find_spec(self.module, [*self._path(), *sys.path]) else None

    @property
    def entry_points(self) -> tuple[str, ...]:
        """The ids of its entry points, such as "liger.cross_entropy", which stay the same."""
        tree = ast.parse((_HERE / f"{self.name}.py").read_text(encoding="utf-8"))
        return tuple(
            f"{self.name}.{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef) and _is_entry(node)
        )

    def find(self, file: str) -> Path | None:
        """Returns where a file of the library is, such as "torch/nn/functional.py"; None if it is
        not installed.
        """
        spec = PathFinder.find_spec(self.module)
        folders = [Path(folder).parent for folder in (spec and spec.submodule_search_locations) or ()]
        return next((folder / file for folder in folders if (folder / file).is_file()), None)

    def check(self) -> None:
        """Makes a checkout importable.

        Raises:
            UsageError: if the library is not installed, or too old; in a line with the known
                versions.
        """
        found, known = self.installed, " or ".join(self.known)
        if found is None:
            raise UsageError(f"lossgate.adapters.{self.name}: {self.package} is not installed; {self._way_out(known)}")
        if self.is_release and _numbers(found) < _numbers(self.known[0]):
            raise UsageError(
                f"lossgate.adapters.{self.name}: {self.package} {found} is too old; known is {known} and what is newer"
            )
        sys.path.extend(path for path in self._path() if path not in sys.path)

    def _way_out(self, known: str) -> str:
        if self.is_release:
            one, *more = self.known
            # A range, since the newest may refuse this Python.
            wanted = f"'{self.package}>={one},<={more[-1]}'" if more else f"{self.package}=={one}"
            return f"known is {known}: pip install {wanted}"
        return f"known is {known}: put a checkout into {CHECKOUTS}/{self.module}, or have it importable"

    def _path(self) -> list[str]:
        folder = os.environ.get(CHECKOUTS)
        return [str(Path(folder) / self.module)] if folder and not self.is_release else []


def _is_entry(node: ast.FunctionDef) -> bool:
    called = [decorator.func for decorator in node.decorator_list if isinstance(decorator, ast.Call)]
    return any(isinstance(function, ast.Name) and function.id == "entry" for function in called)


def _numbers(release: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without what follows them."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(map(int, found[0].split("."))) if found else ()


def _release(name: str, package: str, module: str, *known: str) -> Library:
    return Library(name=name, package=package, module=module, known=known)


def _checkout(name: str, package: str, module: str, *known: str) -> Library:
    return Library(name=name, package=package, module=module, known=known, is_release=False)


LIBRARIES = {
    library.name: library
    for library in (
        _release("torch", "torch", "torch", "2.11.0", "2.13.0", "2.14.1"),
        _release("liger", "liger-kernel", "liger_kernel", "0.8.5"),
        _release("trl", "trl", "trl", "1.16.0"),
        _release("verl", "verl", "verl", "0.9.1"),
        _release("megatron", "megatron-core", "megatron", "0.16.1", "0.19.2"),
        _release("transformers", "transformers", "transformers", "5.23.0", "5.24.0"),
        _release("cut_cross_entropy", "cut-cross-entropy", "cut_cross_entropy", "25.1.1"),
        _release("deepspeed", "deepspeed", "deepspeed", "0.19.8"),
        _release("torchtune", "torchtune", "torchtune", "0.6.1"),
        _release("openrlhf", "openrlhf", "openrlhf", "0.11.2"),
        _checkout("nemo_rl", "NVIDIA-NeMo/RL", "nemo_rl", "7ea279abf"),
        _checkout("areal", "inclusionAI/AReaL", "areal", "1.0.4", "4aef98d8d"),
        _checkout("open_instruct", "allenai/open-instruct", "open_instruct", "e6c3044aa"),
        _checkout("slime", "THUDM/slime", "slime", "624b824a8"),
        _checkout("torchtitan", "pytorch/torchtitan", "torchtitan", "0.3.0", "b5bcd76c6"),
        _checkout("unsloth", "unslothai/unsloth-zoo", "unsloth_zoo", "2026.10.9", "ce232d6c"),
    )
}
"""By the name of the adapter."""


def available(targets: Sequence[str]) -> Iterator[tuple[str, UsageError | None]]:
    """Yields each target, and what keeps it from being imported, if it is an adapter of a library
    that is not there, or too old.
    """
    for target in targets:
        location = target.partition(":")[0]
        library = LIBRARIES.get(location.removeprefix(f"{__name__}."))
        try:
            if library is not None and location.startswith(f"{__name__}."):
                library.check()
            yield target, None
        except UsageError as error:
            yield target, error
