# SPDX-License-Identifier: Apache-2.0
"""A size as an expression of named dims, such as ``chunk*vocab/tp``."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, floor, inf
from operator import add, eq, floordiv, ge, gt, le, lt, mod, mul, ne, sub, truediv
from typing import Any

from lossgate.base.errors import UsageError

_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
    ast.Eq: eq,
    ast.NotEq: ne,
    ast.Lt: lt,
    ast.LtE: le,
    ast.Gt: gt,
    ast.GtE: ge,
}
FUNCTIONS: Mapping[str, Callable[..., float]] = {"ceil": ceil, "floor": floor, "max": max, "min": min}
_ALLOWED = "numbers, names, + - * / // %, comparisons, and " + ", ".join(FUNCTIONS)


@dataclass(frozen=True)
class SizeExpression:
    """An expression of named dims. It is parsed, and never executed as Python.

    A comparison has the value 1 if it holds, and 0 if not.

    Raises:
        UsageError: if the text is no such expression.
    """

    text: str

    def __post_init__(self) -> None:
        for node in ast.walk(self._tree):
            if problem := _problem(node):
                raise UsageError(f"{self.text!r} has {problem}; expected {_ALLOWED}")

    @property
    def _tree(self) -> ast.expr:
        try:
            return ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UsageError(f"{self.text!r} is no expression; expected {_ALLOWED}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The dims that it names, in order."""
        return tuple(dict.fromkeys(_names(self._tree)))

    def value(self, sizes: Mapping[str, float]) -> float:
        """Returns the value of the expression.

        Args:
            sizes: the size of each dim that it names.

        Raises:
            UsageError: if it has no finite value of at least 0 for these sizes.
        """
        given = ", ".join(f"{name} {sizes[name]:g}" for name in self.names) or "any sizes"
        try:
            value = float(_value(self._tree, sizes))
        except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"{self.text!r} has no value with {given}: {error}") from None
        if not 0 <= value < inf:
            raise UsageError(f"{self.text!r} is {value:g} with {given}; expected a finite number that is not negative")
        return value

    def __str__(self) -> str:
        return self.text


def _names(node: ast.expr) -> Iterator[str]:
    """Yields the names of dims in an expression, in order."""
    functions = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
    dims = [n for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in functions]
    yield from (n.id for n in sorted(dims, key=lambda n: (n.lineno, n.col_offset)))


def _problem(node: ast.AST) -> str | None:
    """Describes what is wrong with a node; None if nothing is."""
    match node:
        case ast.Constant(value=value):
            return None if type(value) in (int, float) else f"the value {value!r}"
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return None if name in FUNCTIONS and args else f"the call {ast.unparse(node)}"
        case ast.Call():
            return f"the call {ast.unparse(node)}"
        case ast.Compare(ops=ops):
            return None if len(ops) == 1 and type(ops[0]) in _OPERATORS else f"the comparison {ast.unparse(node)}"
        case ast.BinOp(op=op):
            return None if type(op) in _OPERATORS else f"the operation {ast.unparse(node)}"
        case ast.UnaryOp(op=op):
            return None if isinstance(op, ast.USub) else f"the operation {ast.unparse(node)}"
        case ast.Name() | ast.operator() | ast.cmpop() | ast.unaryop() | ast.expr_context():
            return None
        case _:
            return f"the term {ast.unparse(node)}"


def _value(node: ast.expr, sizes: Mapping[str, float]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(operand=operand):
            return -_value(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return int(_OPERATORS[type(op)](_value(left, sizes), _value(right, sizes)))
        case ast.Call(func=ast.Name(id=name), args=args):
            return FUNCTIONS[name](*(_value(argument, sizes) for argument in args))
        case _:
            raise TypeError(ast.unparse(node))
