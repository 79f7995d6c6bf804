# SPDX-License-Identifier: Apache-2.0
"""The references, the kernels and the harness do not import each other, and references are short.

An oracle that shared code with a kernel would share its bugs.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imports_of(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.split(".")[0] for name in plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    }


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("references/dense_losses", {"fused_losses", "lossgate"}),
        ("kernels/fused_losses", {"dense_losses", "lossgate"}),
        ("harness/lossgate", {"fused_losses"}),
    ],
)
def test_packages_do_not_import_each_other(package: str, forbidden: set[str]) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    assert not {str(file): imports_of(file) & forbidden for file in files if imports_of(file) & forbidden}


@pytest.mark.parametrize(
    "source",
    [
        "import lossgate",
        "import torch, lossgate.base.errors as e",
        "from lossgate.engine import run",
        "def late():\n    from lossgate import Layout",
        "if TYPE_CHECKING:\n    import lossgate.base.layout",
    ],
)
def test_an_import_is_found_wherever_it_stands(source: str, tmp_path: Path) -> None:
    file = tmp_path / "made_up.py"
    file.write_text(source)
    assert "lossgate" in imports_of(file)


def test_references_are_short() -> None:
    """A reference reads beside its formula: a function has at most 40 lines of code."""
    for file in (ROOT / "references/dense_losses").glob("*.py"):
        tree = ast.parse(file.read_text())
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            assert sum((node.end_lineno or 0) - node.lineno + 1 for node in body) <= 40, function.name
