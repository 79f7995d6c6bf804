# SPDX-License-Identifier: Apache-2.0
"""Where a reference calls its operations, and a change to what one of them gives."""

import sys
from collections.abc import Callable, Collection, Mapping
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Site = tuple[str, int, str, tuple[int, int] | None]
"""File, line, operation, and where its expression begins and ends on the line; None for all of that
kind on the line."""
Change = Callable[[Tensor, tuple[Any, ...]], Any]
"""Gets what an operation gave, and its arguments."""


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
"""The operations by the names that torch calls them by."""


class _AtSites(TorchFunctionMode):
    """Knows from which line of a reference each operation is called."""

    def __torch_function__(
        self, func: Any, types: Collection[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _NAMES.get(getattr(func, "__name__", ""), "")
        if not name or not self.asks_about(name):
            return func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_back is not None and _passed_over(frame.f_code.co_filename):
            frame = frame.f_back
        found = func(*self.given(frame, name, args), **(kwargs or {}))
        return self.at(frame, name, found, args) if isinstance(found, Tensor) else found

    def asks_about(self, operation: str) -> bool:
        """Returns whether it matters where an operation is called: to look is slow."""
        return True

    def given(self, frame: FrameType, operation: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the arguments with which it is called."""
        return args

    def at(self, frame: FrameType, operation: str, found: Tensor, args: tuple[Any, ...]) -> Any:
        """Returns what stands in place of what it gave."""
        raise NotImplementedError


class Traced(_AtSites):
    """Collects the sites of a run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[Site, None] = {}
        self.uses: dict[tuple[Site, Site], None] = {}
        """Where the gradient is stopped, and an operation that is given what comes of it."""
        self._of_tensors: set[Site] = set()
        self._stopped: dict[int, tuple[Site, Tensor]] = {}

    def at(self, frame: FrameType, operation: str, found: Tensor, args: tuple[Any, ...]) -> Any:
        site = _site(frame, operation)
        self.sites[site] = None
        if len(args) < 2 or isinstance(args[1], Tensor):
            self._of_tensors |= {site, (*site[:3], None)}
        for arg in args:
            if id(arg) in self._stopped:
                self.uses[self._stopped[id(arg)][0], site] = None
        if operation == "detach":
            self._stopped[id(found)] = site, found  # kept, or its number would be given again
        return found

    def takes_number(self, site: Site) -> bool:
        """Returns whether one of two arguments is always a number. Torch calls ``2 * x`` as it
        calls ``x * 2``.
        """
        return site not in self._of_tensors


class Attached(_AtSites):
    """Gives one operation what it is given of a stopped gradient with the gradient, and does not
    stop it at another place, where it comes through later.
    """

    def __init__(self, stops: Site, use: Site, later: Site | None) -> None:
        super().__init__()
        self._stops, self._use, self._later = stops, use, later
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}

    def asks_about(self, operation: str) -> bool:
        return operation in ("detach", self._use[2])

    def given(self, frame: FrameType, operation: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not any(id(arg) in self._sources for arg in args) or _site(frame, operation) != self._use:
            return args
        return tuple(self._sources[id(arg)][1] if id(arg) in self._sources else arg for arg in args)

    def at(self, frame: FrameType, operation: str, found: Tensor, args: tuple[Any, ...]) -> Any:
        site = _site(frame, operation)
        if site == self._stops:
            self._sources[id(found)] = found, args[0]
        return args[0] if site == self._later else found


class Changed(_AtSites):
    """Changes what the operation at one site gives."""

    def __init__(self, site: Site | None, change: Change) -> None:
        """Remembers the site, or None for every softmax of the whole vocabulary, and the change."""
        super().__init__()
        self._site, self._change = site, change

    def asks_about(self, operation: str) -> bool:
        return operation == ("log_softmax" if self._site is None else self._site[2])

    def at(self, frame: FrameType, operation: str, found: Tensor, args: tuple[Any, ...]) -> Any:
        if self._site is not None:
            file, line, _, span = self._site
            if (file, line) != (frame.f_code.co_filename, frame.f_lineno) or span not in (None, _span(frame)):
                return found
        return self._change(found, args)


def _site(frame: FrameType, operation: str) -> Site:
    return frame.f_code.co_filename, frame.f_lineno, operation, _span(frame)


def _span(frame: FrameType) -> tuple[int, int] | None:
    """Returns where the expression that a frame computes begins and ends, if it is on one line."""
    positions = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    line, last, begin, end = positions
    return None if begin is None or end is None or line != last else (begin, end)


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])


def _passed_over(file: str) -> bool:
    """Returns whether a file only stands between a reference and torch."""
    between = file.startswith(_OWN) and not file.startswith(f"{_OWN}/losses")
    return between or file.startswith(_TORCH)
