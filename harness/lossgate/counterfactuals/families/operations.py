# SPDX-License-Identifier: Apache-2.0
"""Single operations of a reference: left out, turned round, cut off from the gradient.

They come for every loss, also for one that declares nothing but its inputs. What operations there
are is seen in a run. A mistake names the line of the reference that holds its operation.
"""

import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lossgate.counterfactuals.counterfactual import Counterfactual, mistake
from lossgate.counterfactuals.seams import with_gradient_of
from lossgate.counterfactuals.setting import Fields, Setting
from lossgate.specs.bound_spec import BoundSpec
from lossgate.specs.token_values import TokenValues

Site = tuple[str, int, str]
"""File, line and operation."""
Change = Callable[[Tensor, tuple[Any, ...]], Any]
"""Gets what an operation gave, and its arguments."""


def operations(setting: Setting) -> Iterator[Counterfactual]:
    """Yields the mistakes of each operation that the loss of a problem takes."""
    if setting.spec.reference is None:
        return
    values = setting.bound.dense.token_values(setting.bound_spec)
    with _Traced() as traced:
        setting.bound_spec.loss(values, setting.fields)
    for site in traced.sites:
        file, line, operation = site
        code = " ".join(linecache.getline(file, line).split())
        where = f"`{code}` ({Path(file).name}, line {line})"
        for what, change in _CHANGES.get(operation, {}).items():
            yield mistake(
                f"{Path(file).stem}:{line} {operation}: {what}",
                f"what the reference does in {where} is done otherwise: {what}",
                "operation",
                loss=partial(_loss, site, change),
            )


def _loss(
    site: Site, change: Change, bound: BoundSpec, values: TokenValues, fields: Fields
) -> tuple[Tensor, dict[str, Tensor]]:
    with _Changed(site, change):
        return bound.loss(values, fields)


class _AtSites(TorchFunctionMode):
    """Knows from which line of a reference each operation is called."""

    def __torch_function__(
        self, func: Any, types: Collection[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = _NAMES.get(getattr(func, "__name__", ""), "")
        if not name or not isinstance(found, Tensor):
            return found
        frame = sys._getframe(1)
        while frame.f_back is not None and _passed_over(frame.f_code.co_filename):
            frame = frame.f_back
        return self.at((frame.f_code.co_filename, frame.f_lineno, name), found, args)

    def at(self, site: Site, found: Tensor, args: tuple[Any, ...]) -> Any:
        raise NotImplementedError


class _Traced(_AtSites):
    """Collects the sites of a run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[Site, None] = {}

    def at(self, site: Site, found: Tensor, args: tuple[Any, ...]) -> Any:
        self.sites[site] = None
        return found


class _Changed(_AtSites):
    """Changes what the operation at one site gives."""

    def __init__(self, site: Site, change: Change) -> None:
        super().__init__()
        self._site, self._change = site, change

    def at(self, site: Site, found: Tensor, args: tuple[Any, ...]) -> Any:
        return self._change(found, args) if site == self._site else found


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[2])


def _passed_over(file: str) -> bool:
    """Returns whether a file only stands between a reference and torch."""
    between = file.startswith(_OWN) and not file.startswith(f"{_OWN}/losses")
    return between or file.startswith(_TORCH)


def _tensor(x: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(x, dtype=like.dtype).expand_as(like)


def _first(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return _tensor(args[0], found)


def _second(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return _tensor(args[1], found)


def _kept(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Returns what ``where`` takes where its condition holds."""
    return _tensor(args[1], found)


def _cut(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return found.detach()


def _straight_through(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return with_gradient_of(found, _tensor(args[0], found))


def _smaller(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return torch.minimum(args[0], args[1])


def _larger(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return torch.maximum(args[0], args[1])


def _turned(found: Tensor, args: tuple[Any, ...]) -> Tensor:
    return -found


_NO_GRADIENT: Mapping[str, Change] = {"without its gradient": _cut}
_CLAMP: Mapping[str, Change] = {
    "left out": _first,
    "left out in backward": _straight_through,
    **_NO_GRADIENT,
}
_CHANGES: Mapping[str, Mapping[str, Change]] = {
    "detach": {"the gradient is not stopped": _first},
    "clamp": _CLAMP,
    "maximum": {
        "the smaller is taken": _smaller,
        "always the first": _first,
        "always the second": _second,
        **_NO_GRADIENT,
    },
    "minimum": {
        "the larger is taken": _larger,
        "always the first": _first,
        "always the second": _second,
        **_NO_GRADIENT,
    },
    "neg": {"the sign is left out": _first},
    "mul": {"the second factor is left out": _first, "the first factor is left out": _second, **_NO_GRADIENT},
    "div": {"the division is left out": _first, **_NO_GRADIENT},
    "add": {"the second summand is left out": _first, "the first summand is left out": _second, **_NO_GRADIENT},
    "sub": {"the difference is turned round": _turned, "what is subtracted is left out": _first, **_NO_GRADIENT},
    "exp": {"left out": _first, **_NO_GRADIENT},
    "where": {"the condition is ignored": _kept, **_NO_GRADIENT},
    "sum": _NO_GRADIENT,
    "logaddexp": {"always the first": _first, "always the second": _second, **_NO_GRADIENT},
}
"""How each operation can be done otherwise."""

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
    "where": "where",
    "sum": "sum",
    "logaddexp": "logaddexp",
}
"""The operations by the names that torch calls them by."""
