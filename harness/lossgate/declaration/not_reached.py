# SPDX-License-Identifier: Apache-2.0
"""Why a file that declares a candidate has none when it is imported."""

import ast
import inspect
from types import ModuleType


def not_reached(module: ModuleType) -> str:
    """Returns where a module's text declares a candidate that its import did not make, in words.

    It is empty if the text declares none.
    """
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):  # as of a module that is compiled
        return ""
    lines = sorted(node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _declares(node.func))
    if not lines:
        return ""
    return (
        f"line {lines[0]} declares one, but is not reached by an import: move it to the top of the file, "
        "out of functions and of if __name__ == '__main__'"
    )


def _declares(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "candidate"
