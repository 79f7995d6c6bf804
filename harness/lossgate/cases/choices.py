# SPDX-License-Identifier: Apache-2.0
"""Records what a loss chooses by size: comparisons, clamps, kinks and extremes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lossgate.numerics.dispatched import DispatchMode, arguments_of, base_name

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "maximum", "minimum", "fmax", "fmin"])

_AT_ZERO = frozenset(["abs", "sign", "sgn", "heaviside", "relu", "leaky_relu", "prelu", "_prelu_kernel", "elu"])

_EDGES: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Any]]] = MappingProxyType(
    {
        "clamp": lambda given: (given["min"], given["max"]),
        "clamp_min": lambda given: (given["min"],),
        "clamp_max": lambda given: (given["max"],),
        "hardtanh": lambda given: (given["min_val"], given["max_val"]),
        "threshold": lambda given: (given["threshold"],),
        "hardshrink": lambda given: (given["lambd"], -given["lambd"]),
        "softshrink": lambda given: (given["lambd"], -given["lambd"]),
        "hardsigmoid": lambda given: (3.0, -3.0),
        "hardswish": lambda given: (3.0, -3.0),
    }
)
"""Where else an operation has kinks, from its arguments."""

_EXTREMES = {
    "amax": (True,),
    "argmax": (True,),
    "max": (True,),
    "amin": (False,),
    "argmin": (False,),
    "min": (False,),
    "aminmax": (True, False),
}
"""Reductions to an extreme: whether they choose the largest."""

_NORM = "linalg_vector_norm"

_CHOOSING = frozenset([*_COMPARISONS, *_AT_ZERO, *_EDGES, *_EXTREMES, _NORM, "topk", "scatter_reduce"])


class RecordChoices(DispatchMode):
    """Records the outcome of each choice in turn: the sign of a difference, 0 for a tie.

    Of a reduction to an extreme it is the number of the entry chosen, from 1 on. Of ``topk`` it is
    whether each entry is chosen.

    What sorts is no choice: what is made of it may be smooth, as in sparsemax. Nor is what rounds
    to whole numbers: its derivative is 0 on both sides.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = base_name(func)
        if name in _CHOOSING and any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args):
            # Before it runs, since an operation in place changes its input.
            self.outcomes += _outcomes(name, args[0], arguments_of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _outcomes(name: str, x: Tensor, given: Mapping[str, Any]) -> Iterator[Tensor]:
    if name in _COMPARISONS or (name in ("max", "min") and "other" in given):
        yield _sign(x - given["other"])
    elif name in _AT_ZERO:
        yield _sign(x)
    elif name in _EDGES:
        yield from (_sign(x - edge) for edge in _EDGES[name](given) if edge is not None)
    elif name == "topk":
        yield _is_in_top(x, given)
    elif name == "scatter_reduce":
        if given["reduce"] in ("amax", "amin"):
            reached = torch.scatter_reduce(x, **{key: given[key] for key in _SCATTERED})
            used = given["src"][tuple(map(slice, given["index"].shape))]  # the rest of src goes nowhere
            yield _sign(used - reached.gather(given["dim"], given["index"]))
    elif name == _NORM:
        if given["ord"] == 1:
            yield _sign(x)
        elif abs(given["ord"]) == inf:
            yield _chosen(x.abs() if given["ord"] > 0 else -x.abs(), given.get("dim"))
    elif name in _EXTREMES:
        yield from (_chosen(x if largest else -x, given.get("dim")) for largest in _EXTREMES[name])


_SCATTERED = ("dim", "index", "src", "reduce", "include_self")


def _is_in_top(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Returns 1 where an entry is among the k largest, or smallest, and -1 elsewhere; 0 where two
    are equal and one of them is.
    """
    k, dim = given["k"], given["dim"]
    if not 0 < k < x.shape[dim]:
        return torch.zeros_like(x)
    ordered = (x if given["largest"] else -x).topk(k + 1, dim).values
    last, next_ = ordered.narrow(dim, k - 1, 1), ordered.narrow(dim, k, 1)
    return _sign((x if given["largest"] else -x) - (last + next_) / 2)


def _sign(difference: Tensor) -> Tensor:
    return difference.sign().nan_to_num_(0.0)


def _chosen(x: Tensor, dim: Any) -> Tensor:
    """Returns which entry is the largest along some dims, or of all; 0 where two are."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    entries = x.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) if dims else x[..., None]
    if entries.shape[-1] < 2:
        return torch.zeros(entries.shape[:-1])
    top = entries.topk(2, -1)
    return torch.where(top.values[..., 0] == top.values[..., 1], 0, top.indices[..., 0] + 1)
