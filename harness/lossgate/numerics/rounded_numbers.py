# SPDX-License-Identifier: Apache-2.0
"""Rounds the numbers that code writes, such as a weight of 0.1, as a kernel holds them."""

from collections.abc import Callable, Mapping
from functools import cache
from math import copysign, frexp, isfinite, sqrt
from typing import Any

import torch
from numpy import float32
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lossgate.numerics.float_formats import FLOAT32
from lossgate.numerics.round_every_operation import RoundEveryOperation

ERRORS = 64
"""Errors that a run needs. A loss that writes more numbers uses them again."""

_ARITHMETIC = """
    add radd sub rsub subtract mul rmul multiply div rdiv divide truediv rtruediv true_divide pow rpow where
    clamp_min clamp_max
"""
_NAMES = frozenset(_ARITHMETIC.split())
_BETWEEN = frozenset(["clamp", "clip"])
_FILLED = frozenset(["full", "full_like", "new_full"])


class RoundNumbers(TorchFunctionMode):
    """Gives each number that an operation takes, or is filled with, the error of float32.

    The error is drawn once for a run, and is the same for all tokens and wherever the number is
    written: it does not average out.
    Where a loss is a small difference, such as a divergence of nearly equal distributions, it is
    the largest one.

    Numbers that float32 holds exactly are left alone, and so are those of operations in place and
    those inside a function of torch, such as ``alpha`` of ``add`` or ``label_smoothing`` of
    ``cross_entropy``.
    """

    def __init__(self, errors: Tensor, rounding: RoundEveryOperation) -> None:
        """Prepares one run.

        Args:
            errors: ``[ERRORS]`` float64, uniform in [-1, 1).
            rounding: what rounds the results, which leaves these numbers alone.
        """
        super().__init__()
        self._errors, self._rounding = errors, rounding
        self._seen: dict[float, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = _takes_numbers(func), dict(kwargs or {})
        if not name or "out" in kwargs or not any(map(_is_rounded, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if name in _NAMES and _in_float64(args, kwargs):
            held = {key: value if key == "alpha" else self._held(value) for key, value in kwargs.items()}
            return func(*map(self._held, args), **held)
        if name in _BETWEEN and _in_float64(args, kwargs):
            bounds = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
            if any(map(_is_rounded, bounds.values())):  # both are tensors then, or both are numbers
                bounds = {key: self._held(value, always=True) for key, value in bounds.items()}
            return func(args[0], **bounds)
        result = func(*args, **kwargs)
        if name == "masked_fill" and _in_float64(args, kwargs):
            value = kwargs["value"] if "value" in kwargs else args[2]
            if _is_rounded(value):
                return torch.where(kwargs["mask"] if "mask" in kwargs else args[1], self._held(value), args[0])
        if name in _FILLED and result.dtype is torch.float64:
            value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
            if _is_rounded(value):
                return self._held(value).expand(result.shape).clone()
        return result

    def _held(self, number: Any, always: bool = False) -> Any:
        """Returns a number as a run holds it: a scalar tensor, if that is another one."""
        if not _is_rounded(number) and not (always and isinstance(number, int | float)):
            return number
        spacing = 2.0 ** (frexp(number)[1] - 1) * FLOAT32.unit * sqrt(2) if _is_rounded(number) else 0.0
        with self._rounding.paused():
            error = self._errors[self._seen.setdefault(abs(number), len(self._seen)) % len(self._errors)]
            return number + copysign(spacing, number) * error


@cache
def _takes_numbers(func: Callable[..., Any]) -> str:
    """Returns the name of a function whose numbers are rounded; empty for all others, and for what
    works in place.
    """
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.startswith("_"):
        return ""
    plain = name.strip("_")
    return plain if plain in (*_NAMES, *_BETWEEN, *_FILLED, "masked_fill") else ""


def _is_rounded(number: Any) -> bool:
    """Returns whether float32 does not hold a number."""
    return isinstance(number, float) and isfinite(number) and float(float32(number)) != number


def _in_float64(args: Any, kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(arg, Tensor) and arg.dtype is torch.float64 for arg in (*args, *kwargs.values()))
