# SPDX-License-Identifier: Apache-2.0
"""The places where a reference calls its operations, and changes to the result of one operation."""

import ast
import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Site:
    """An operation of a reference, named by the code that calls it.

    Comments, line breaks and changes elsewhere in the file don't change a site. If a function has
    the same code twice, both places are the same site.
    """

    file: str
    """The name of the file, without its folder."""
    function: str
    code: str
    """The expression of the operation, or a statement. A statement stands for all its operations of
    the kind.
    """
    operation: str
    """The kind of operation, such as "mul"."""


class CallSites(NamedTuple):
    """The sites of one call of an operation."""

    expression: Site
    statement: Site


Rewrite = Callable[[Tensor, tuple[Any, ...]], Any]
"""Gets the result of an operation and its arguments. Returns the result that a wrong kernel has."""


_NAMES: Mapping[str, str] = {
    "detach": "detach",
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max"), "clamp"),
    "maximum": "maximum",
    "minimum": "minimum",
    **dict.fromkeys(("neg", "__neg__", "negative"), "neg"),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), "mul"),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), "div"),
    **dict.fromkeys(("add", "__add__", "__radd__"), "add"),
    **dict.fromkeys(("sub", "__sub__"), "sub"),
    **dict.fromkeys(("exp", "expm1"), "exp"),
    "tanh": "tanh",
    **dict.fromkeys(("pow", "__pow__", "square"), "pow"),
    **dict.fromkeys(("log", "log1p"), "log"),
    "logsigmoid": "logsigmoid",
    **dict.fromkeys(("__and__", "logical_and", "bitwise_and"), "and"),
    **dict.fromkeys(("__or__", "logical_or", "bitwise_or"), "or"),
    **dict.fromkeys(("__gt__", "__lt__", "__ge__", "__le__", "gt", "lt", "ge", "le"), "comparison"),
    "where": "where",
    "sum": "sum",
    "logaddexp": "logaddexp",
    "log_softmax": "log_softmax",
}
"""The kinds of operations, by the names of torch's functions."""


class _AtSites(TorchFunctionMode):
    """Finds the code of a reference that calls each operation."""

    def __torch_function__(
        self, func: Any, types: Collection[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _NAMES.get(getattr(func, "__name__", ""), "")
        if not name or not self.asks_about(name):
            return func(*args, **(kwargs or {}))
        call = _call(sys._getframe(1), name)
        found = func(*self.given(call, args), **(kwargs or {}))
        return self.at(call, found, args) if isinstance(found, Tensor) else found

    def asks_about(self, operation: str) -> bool:
        """Returns whether the sites of a kind of operation are looked up, which is slow."""
        return True

    def given(self, call: CallSites, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments with which the operation is called."""
        return args

    def at(self, call: CallSites, found: Tensor, args: tuple[Any, ...]) -> Any:
        """Returns the result that stands in place of what the operation returned."""
        raise NotImplementedError


class Traced(_AtSites):
    """Collects the calls of a run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[CallSites, None] = {}
        self.uses: dict[tuple[Site, Site], None] = {}
        """Each site that stops the gradient, with an operation that uses the detached value."""
        self._of_tensors: set[Site] = set()
        self._stopped: dict[int, tuple[Site, Tensor]] = {}

    def at(self, call: CallSites, found: Tensor, args: tuple[Any, ...]) -> Any:
        self.calls[call] = None
        if len(args) < 2 or isinstance(args[1], Tensor):
            self._of_tensors.update(call)
        for arg in args:
            if id(arg) in self._stopped:
                self.uses[self._stopped[id(arg)][0], call.expression] = None
        if call.expression.operation == "detach":
            # The tensor is kept, as Python may give its id to another tensor once it is gone.
            self._stopped[id(found)] = call.expression, found
        return found

    def of_kind(self, operation: str) -> list[Site]:
        """Returns the expressions that call one kind of operation."""
        own = (call.expression for call in self.calls if call.expression.operation == operation)
        return list(dict.fromkeys(own))

    @property
    def sites(self) -> list[Site]:
        """Each expression. After those of a statement comes the statement, if they are several."""
        statements: dict[Site, dict[Site, None]] = {}
        for expression, statement in self.calls:
            statements.setdefault(statement, {})[expression] = None
        found: dict[Site, None] = {}
        for statement, expressions in statements.items():
            found |= expressions
            if len(expressions) > 1:
                found[statement] = None
        return list(found)

    def takes_number(self, site: Site) -> bool:
        """Returns whether one of two arguments is always a number.

        Torch does not tell which: it calls ``2 * x`` as it calls ``x * 2``.
        """
        return site not in self._of_tensors


class Attached(_AtSites):
    """Undoes the stop of a gradient for one operation that uses the detached value. If the value
    passes a second stop later, that stop can be undone as well.
    """

    def __init__(self, stops: Site, use: Site, later: Site | None) -> None:
        super().__init__()
        self._stops, self._use, self._later = stops, use, later
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}

    def asks_about(self, operation: str) -> bool:
        return operation in ("detach", self._use.operation)

    def given(self, call: CallSites, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._use != call.expression:
            return args
        return tuple(self._sources[id(arg)][1] if id(arg) in self._sources else arg for arg in args)

    def at(self, call: CallSites, found: Tensor, args: tuple[Any, ...]) -> Any:
        if call.expression == self._stops:
            self._sources[id(found)] = found, args[0]
        return args[0] if call.expression == self._later else found


class Changed(_AtSites):
    """Changes the result of the operation at one site."""

    def __init__(self, site: Site | None, rewrite: Rewrite) -> None:
        """Takes the site, or None for every log_softmax, and the change."""
        super().__init__()
        self._site, self._rewrite = site, rewrite

    def asks_about(self, operation: str) -> bool:
        return operation == ("log_softmax" if self._site is None else self._site.operation)

    def at(self, call: CallSites, found: Tensor, args: tuple[Any, ...]) -> Any:
        return self._rewrite(found, args) if self._site is None or self._site in call else found


def _call(frame: FrameType, operation: str) -> CallSites:
    while frame.f_back is not None and _passed_over(frame.f_code.co_filename):
        frame = frame.f_back
    return _call_at(frame.f_code, frame.f_lasti, operation)


@lru_cache(4096)
def _call_at(code: CodeType, instruction: int, operation: str) -> CallSites:
    positions = islice(code.co_positions(), instruction // 2, None)  # an instruction has two bytes
    place = _Place(*next(positions, (None,) * 4))
    function = code.co_qualname.replace(".<locals>", "")
    expression, statement = _code_at(code.co_filename, place)
    file = Path(code.co_filename).name
    return CallSites(Site(file, function, expression, operation), Site(file, function, statement, operation))


class _Place(NamedTuple):
    """The place in a file from which an instruction comes, as far as the interpreter knows it."""

    line: int | None
    last_line: int | None
    begin: int | None
    end: int | None

    def is_in(self, node: ast.AST) -> bool:
        if self.line is None or self.last_line is None or self.begin is None or self.end is None:
            return False
        begins = (node.lineno, node.col_offset) <= (self.line, self.begin)  # pyright: ignore
        return begins and (self.last_line, self.end) <= (node.end_lineno, node.end_col_offset)  # pyright: ignore


def _code_at(file: str, place: _Place) -> tuple[str, str]:
    """Returns the expression at a place and the statement that holds it. If the code can't be read,
    both are the number of the line.
    """
    around = list(_around(_parsed(file), place))
    if not around:
        return f"line {place.line}", f"line {place.line}"
    number = max(number for number, node in enumerate(around) if isinstance(node, ast.stmt))
    if hasattr(around[number], "body") and number + 1 < len(around):
        number += 1  # the code is in the head of a block, as in `if x.any():`
    return ast.unparse(around[-1]), ast.unparse(around[number])


def _around(node: ast.AST, place: _Place) -> Iterator[ast.AST]:
    """Yields the statements and expressions in a node that contain a place, outermost first."""
    for child in ast.iter_child_nodes(node):
        is_code = isinstance(child, ast.stmt | ast.expr)
        if is_code and place.is_in(child):
            yield child
        if not is_code or place.is_in(child):
            yield from _around(child, place)


@lru_cache(64)
def _parsed(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])


def _passed_over(file: str) -> bool:
    """Returns whether a file is not part of a reference: it is of torch, or of lossgate outside of
    its losses.
    """
    is_own = file.startswith(_OWN) and not file.startswith(f"{_OWN}/losses")
    return is_own or file.startswith(_TORCH)
