# SPDX-License-Identifier: Apache-2.0
"""Which candidates a module makes and then deletes by ``del``.

They are known from those that a loop replaces under one name by the text of the module alone: both
have no name in the end.
"""

import ast
import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from lossgate.declaration.made import Made


def deleted_in(module: ModuleType, made: Sequence[Made]) -> list[Any]:
    """Returns what a module made and deleted: the last that it had bound to each name by then.

    Args:
        module: after its import.
        made: what it made, in order.
    """
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):  # as of a module that is compiled
        return []
    statements = [*_outside_functions(tree)]
    deletions = [*_deletions(statements)]
    if not deletions:
        return []
    bound = [(one, _bound_at(one.line, statements)) for one in made]
    gone = list[Any]()
    for name, line in deletions:
        before = [one.what for one, names in bound if name in names and one.line < line]
        gone += before[-1:]
    return gone


def _deletions(statements: Sequence[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yields each name that is deleted, and where."""
    for statement in statements:
        if isinstance(statement, ast.Delete):
            yield from ((one.id, statement.lineno) for one in statement.targets if isinstance(one, ast.Name))


def _outside_functions(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _outside_functions(child)


def _bound_at(line: int, statements: Sequence[ast.stmt]) -> set[str]:
    """Returns the names that the statement on a line binds to what it makes."""
    found = set[str]()
    for statement in statements:
        decorators = statement.decorator_list if isinstance(statement, ast.FunctionDef) else []
        first = min([statement.lineno, *(one.lineno for one in decorators)])
        if not first <= line <= (statement.end_lineno or first):
            continue
        if isinstance(statement, ast.FunctionDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign):
            found.update(one.id for one in statement.targets if isinstance(one, ast.Name))
    return found
