# SPDX-License-Identifier: Apache-2.0
"""A module of the harness imports only from its own room and from lower rooms.

References, kernels and harness keep apart too: see references/test_independence.py.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lossgate

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "harness/lossgate"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("numerics",),
    ("problems",),
    ("specs",),
    ("losses",),
    ("inputs", "options"),
    ("declaration",),
    ("dense_candidates", "tour"),
    ("judge",),
    ("worlds",),
    ("cases",),
    ("strategies",),
    ("observe",),
    ("properties",),
    ("counterfactuals",),
    ("adequacy",),
    ("diagnosis",),
    ("engine",),
    ("adapters",),
    ("findings",),
    ("spec_check",),
    ("evidence",),
    ("gate",),
    ("plain_functions",),
    ("reports",),
    ("pytest_plugin",),
    ("cli", "__main__"),
)
"""The rooms, low to high, as in ARCHITECTURE.md. Within a floor there is no rule."""

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""``(module, what it imports): reason``. No module needs one."""

HEIGHT = {room: height for height, floor in enumerate(FLOORS) for room in floor}
ANYWHERE = {"__version__", "TESTED_TORCH"}
"""The names that ``lossgate/__init__.py`` holds itself. It takes its other names from rooms."""


def module_name(file: Path) -> str:
    """Returns the dotted name below lossgate: ``engine.cell``; ``engine`` for its ``__init__``."""
    parts = file.relative_to(HARNESS).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str) -> Iterator[str]:
    """Yields what a module imports of lossgate, wherever the import stands, as dotted names."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (a.name.removeprefix("lossgate.") for a in names if a.name.startswith("lossgate."))
            case ast.ImportFrom(level=level) if level:
                yield f"{'.' * level}{node.module or ''}"
            case ast.ImportFrom(module="lossgate", names=names):
                yield from (_home(alias.name) for alias in names)
            case ast.ImportFrom(module=str(module)) if module.startswith("lossgate."):
                yield module.removeprefix("lossgate.")
            case ast.Attribute(value=ast.Name(id="lossgate"), attr=attr):
                yield _home(attr)
            case _:
                pass


def _home(name: str) -> str:
    """Returns the module from which lossgate takes a public name, or the name itself."""
    return lossgate._HOMES.get(name, name)


def breaches(module: str, source: str) -> list[str]:
    """Returns in words what a module imports from higher rooms, or in a way that hides the room."""
    found: list[str] = []
    for name in imported(source):
        room = name.partition(".")[0]
        if name in ANYWHERE or (module, name) in EXCEPTIONS:
            continue
        if room not in HEIGHT:
            found.append(f"{module} imports {name}, which is in no room; import lossgate.ROOM.MODULE")
        elif HEIGHT[room] > HEIGHT[module.partition(".")[0]]:
            found.append(f"{module} imports {name}, which is in a higher room")
    return found


MODULES = {module_name(file): file for file in sorted(HARNESS.rglob("*.py")) if file != HARNESS / "__init__.py"}


def test_modules_import_from_their_own_and_lower_rooms() -> None:
    unknown = [module for module in MODULES if module.partition(".")[0] not in HEIGHT]
    assert unknown == [], "a new room needs its place in the list and in ARCHITECTURE.md"
    assert [breach for module, file in MODULES.items() for breach in breaches(module, file.read_text())] == []


def test_every_room_and_exception_is_in_use() -> None:
    assert {module.partition(".")[0] for module in MODULES} == set(HEIGHT)
    for module, name in EXCEPTIONS:
        assert name in set(imported(MODULES[module].read_text()))


def test_the_list_is_that_of_the_page() -> None:
    """The first column of the table in ARCHITECTURE.md names the rooms in the same order."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    _, _, section = page.partition("## Rooms of `harness/lossgate`")
    rows = re.findall(r"^\|([^|]*`[^|]*)\|", section.partition("\n## ")[0], re.MULTILINE)
    named = [name.removesuffix(".py").rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert named == [room for floor in FLOORS for room in floor if room != "__main__"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from lossgate.engine.cell import Cell", "engine.cell"),
        ("from lossgate.engine import cell", "engine"),
        ("import lossgate.engine.cell", "engine.cell"),
        ("import torch, lossgate.reports.terminal as t", "reports.terminal"),
        ("from lossgate import suite", "pytest_plugin.suite"),
        ("from lossgate import property", "properties.registry"),
        ("from lossgate import engine", "engine"),
        ("import lossgate\nlossgate.suite(1)", "pytest_plugin.suite"),
        ("def late():\n    from lossgate.engine.cell import Cell", "engine.cell"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lossgate.cli import main", "cli"),
        ("class A:\n    def b(self):\n        if 1:\n            import lossgate.engine.run", "engine.run"),
    ],
)
def test_an_import_from_a_higher_room_is_found(source: str, name: str) -> None:
    assert breaches("judge.made_up", source) == [f"judge.made_up imports {name}, which is in a higher room"]
    assert breaches("cli", source) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from . import power", "."),
        ("from ..engine import cell", "..engine"),
        ("from lossgate import nowhere", "nowhere"),
    ],
)
def test_an_import_that_names_no_room_is_found(source: str, name: str) -> None:
    assert breaches("judge.made_up", source) == [
        f"judge.made_up imports {name}, which is in no room; import lossgate.ROOM.MODULE"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from lossgate.judge.tolerance import plant",
        "from lossgate import Layout, Precision",
        "import lossgate\nprint(lossgate.__version__)",
        "import torch\nfrom collections.abc import Mapping",
        "from dense_losses import nll",
    ],
)
def test_imports_from_the_same_and_lower_rooms_are_right(source: str) -> None:
    assert breaches("judge.made_up", source) == []


def test_the_files_that_a_room_describes_exist() -> None:
    """The docstring of a room tells which file does what."""
    missing: list[str] = []
    for file in HARNESS.glob("*/**/__init__.py"):
        said = ast.get_docstring(ast.parse(file.read_text())) or ""
        for name in re.findall(r"``([a-z][a-z_/]+)``", said):
            near = [folder / f"{name}{end}" for folder in (file.parent, file.parents[1]) for end in (".py", "")]
            missing += [] if any(path.exists() for path in near) else [f"{file}: {name}"]
    assert missing == []
