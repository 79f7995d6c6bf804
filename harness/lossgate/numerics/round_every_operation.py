# SPDX-License-Identifier: Apache-2.0
"""Runs torch code in float64 as if each operation rounded, and each number that the code writes.

The ensemble runs the loss stage of any spec this way, as the reference has it. A number that code
writes, such as a weight of 0.1, is rounded as a kernel holds it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import copysign, frexp, isfinite, sqrt
from typing import Any

import torch
from numpy import float32
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from lossgate.numerics.dispatched import DispatchMode
from lossgate.numerics.float_formats import FLOAT32, FloatFormat, coarsest
from lossgate.numerics.noise import Noise
from lossgate.numerics.torch_operations import SPELLED_OUT, is_view, name_of, rounds, writes

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "eq", "ne"])

_SUMMED = {"sum": 0, "cumsum": 0, "mean": 0, "index_add": 3, "scatter_add": 3, "index_put": 2, "scatter_reduce sum": 3}
"""Operations that add up: the position of what they add."""

_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
"""Products of matrices: the position of the left one, which the right one follows."""


class RoundEveryOperation(DispatchMode):
    """Rounds the float64 result of every dispatched operation that rounds.

    What an operation reads is never written to: a view is returned as it is, and other results are
    new tensors. Only an operation in place rounds what it has written.
    """

    def __init__(self, noise: Noise, to: FloatFormat, *, log_softmax: FloatFormat = FLOAT32) -> None:
        """Prepares rounded runs.

        Args:
            noise: the source of errors.
            to: the format of results.
            log_softmax: that of results of ``log_softmax``, if it is coarser.
        """
        super().__init__()
        self.noise, self.to = noise, to
        self.formats = {"_log_softmax": coarsest(to, log_softmax)}
        self._paused = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leaves results as they are."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or is_view(func):
            return func(*args, **kwargs)
        name = name_of(func, args, kwargs)
        if name in SPELLED_OUT and not writes(func):
            with self:
                return SPELLED_OUT[name](*args, **kwargs)
        if name in _COMPARISONS and isinstance(args[1], Tensor) and args[0].dtype is torch.float64:
            tied = self._with_ties(*args[:2])
            args = (args[0].copy_(tied) if writes(func) and "out" not in kwargs else tied, *args[1:])
        result = func(*args, **kwargs)
        if not rounds(func, args, kwargs):
            return result
        error = self._error(name, func, args, kwargs, result)
        if isinstance(result, Tensor):
            rounded = self._rounded(result, error, self.formats.get(name, self.to))
        else:
            rounded = tree_map_only(Tensor, partial(self._rounded, error=None, to=self.to), result)
        if writes(func):  # the result is an argument
            tree_map(_write, result, rounded)
            return result
        return rounded

    def _rounded(self, exact: Tensor, error: Tensor | None, to: FloatFormat) -> Tensor:
        """Returns a result with its error and that of rounding it. What is not finite stays so."""
        if exact.dtype is not torch.float64 or not exact.dim():
            return exact
        rounded = self.noise.round(exact if error is None else exact + error, to)
        return torch.where(exact.isfinite(), rounded, exact)

    def _with_ties(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns ``a``, with ``b`` in its place wherever the two are equal up to rounding.

        A kernel computes equal results from equal inputs, so that such a comparison stays a tie.
        """
        apart = (a - b).abs()  # infinite or NaN if a number is infinite, which is no tie
        return torch.where(apart.isfinite() & (apart <= 8 * self.to.unit * torch.maximum(a.abs(), b.abs())), b, a)

    def _error(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Tensor | None:
        """Returns what an operation gets wrong beside the rounding of its result.

        It is None for nothing.
        """
        if (
            not isinstance(result, Tensor)
            or result.dtype is not torch.float64
            or not result.dim()
            or not result.numel()
        ):
            return None
        if name == "expm1":
            return self._expm1_error(result)
        if name in ("_log_softmax", "logsumexp", "logcumsumexp"):
            return self._normaliser_error(name, args, result)
        if name in _SUMMED:
            at = _SUMMED[name]
            return self._sum_error(_on(func, args, kwargs, at, 1), args[at : at + 1], kwargs, result, name == "mean")
        if name in _PRODUCTS:
            at = _PRODUCTS[name]
            return self._sum_error(_on(func, args, kwargs, at, 2), args[at : at + 2], kwargs, result, False)
        return None

    def _expm1_error(self, result: Tensor) -> Tensor:
        """Returns the error of a kernel that writes ``exp(x) - 1``, which cancels, or
        ``exp(x) - x - 1`` for ``expm1(x) - x``, which rounds twice at the size of ``exp(x)``.
        """
        size = result.add(1).clamp(min=1) * self.to.unit
        return size * (self.noise.uniform(result.shape) + self.noise.uniform(result.shape))

    def _normaliser_error(self, name: str, args: Sequence[Any], result: Tensor) -> Tensor:
        """Returns the error of the logarithm of a sum of exponentials, however small the result is.

        It holds the rounding of the exponentials and of the logarithm itself, in float32, and is
        the same for a whole row. A kernel that goes over the vocabulary in parts keeps the
        logsumexp, and subtracts it from the logits. So its own rounding, to the format of results,
        is in every log-probability. Torch's ``log_softmax`` of bfloat16 on a CPU is such a kernel.
        """
        if name != "_log_softmax":
            return 1.5 * FLOAT32.unit * self.noise.uniform(result.shape)
        x, dim = args[0], args[1]
        normaliser = (x - result).abs().nan_to_num_(0.0).amax(dim, keepdim=True)
        size = 1.5 * FLOAT32.unit + normaliser * self.formats[name].unit
        return size * self.noise.uniform(size.shape)

    def _sum_error(
        self,
        sums: Callable[..., Tensor],
        terms: Sequence[Tensor],
        kwargs: Mapping[str, Any],
        total: Tensor,
        is_mean: bool,
    ) -> Tensor:
        """Returns the error of K terms that are added one by one in float32, as in
        ``RoundedRun.matmul``.

        Partial sums are rounded, and may be larger than the total.
        """
        square_sum, count = sums(*(term.square() for term in terms)), sums(*(torch.ones_like(term) for term in terms))
        if "alpha" in kwargs:  # it multiplies each term
            square_sum = square_sum * kwargs["alpha"] ** 2
        if is_mean:  # a sum of K terms, divided by K
            count = count * (terms[0].numel() // max(total.numel(), 1))
            square_sum = square_sum / count  # that of the squares was divided by K once, not twice
        size = (count * (total.square() / 3 + square_sum / 2)).sqrt()
        return size * self.noise.uniform(total.shape) * FLOAT32.unit * (count > 1)


def _on(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], position: int, count: int) -> Callable[..., Tensor]:
    """Returns an operation that adds up, as a function of its terms alone. It adds them to 0."""
    before = (torch.zeros_like(args[0]), *args[1:position]) if position else ()
    factors = {key for key, value in kwargs.items() if type(value) in (int, float)}  # alpha, beta
    rest = {key: value for key, value in kwargs.items() if key not in (*factors, "out")}

    def sums(*terms: Tensor) -> Tensor:
        into = {"out": torch.empty_like(kwargs["out"])} if "out" in kwargs else {}
        return func(*before, *terms, *args[position + count :], **rest, **into)

    return sums


def _write(result: Any, rounded: Any) -> None:
    if isinstance(result, Tensor):
        result.copy_(rounded)


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
