# SPDX-License-Identifier: Apache-2.0
"""Runs torch code in float64 as if each operation rounded its result.

The ensemble runs the loss stage of any spec this way, with the code of the reference. Numbers in
that code, such as a weight of 0.1, are rounded as well, because a kernel holds them in float32.
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

from lossgate.numerics.float_formats import FLOAT32, FloatFormat, coarsest
from lossgate.numerics.noise import Noise, power_of_two
from lossgate.numerics.torch_operations import SPELLED_OUT, DispatchMode, is_view, name_of, rounds, writes

_COMPARISONS = frozenset(["gt", "lt", "ge", "le", "eq", "ne"])

_SUMMED = {"sum": 0, "cumsum": 0, "mean": 0, "index_add": 3, "scatter_add": 3, "index_put": 2, "scatter_reduce sum": 3}
"""Operations that add up, and the position of the argument that they add up."""

_SHIFTS = frozenset(["add", "sub", "rsub"])
"""Operations that may add one number to many."""

_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
"""Products of matrices, and the position of the left factor. The right factor follows it."""


class RoundEveryOperation(DispatchMode):
    """Rounds the float64 result of every dispatched operation that rounds.

    Arguments that an operation only reads are never changed: a view of one is returned as it is,
    and a rounded result is a new tensor. Only the result of an operation in place is rounded in
    place.
    """

    def __init__(self, noise: Noise, to: FloatFormat, *, log_softmax: FloatFormat = FLOAT32) -> None:
        """Prepares rounded runs.

        Args:
            noise: the source of errors.
            to: the format of results.
            log_softmax: the format of results of ``log_softmax``, if it is coarser than ``to``.
        """
        super().__init__()
        self.noise, self.to = noise, to
        self.formats = {"_log_softmax": coarsest(to, log_softmax)}
        self._paused = False

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pauses the rounding, so that results stay as they are."""
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
            left = self._with_ties(*args[:2])
            if writes(func) and "out" not in kwargs:  # in place: the result must end in the argument
                left = args[0].copy_(left)
            args = (left, *args[1:])
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
        """Returns a result with its error and that of rounding it. Infinities and NaN stay as they
        are.
        """
        if exact.dtype is not torch.float64 or not exact.dim():
            return exact
        rounded = self.noise.round(exact if error is None else exact + error, to)
        return torch.where(exact.isfinite(), rounded, exact)

    def _with_ties(self, a: Tensor, b: Tensor) -> Tensor:
        """Returns ``a``, with the entries of ``b`` wherever the two are equal up to rounding.

        A kernel computes equal results from equal inputs. So a comparison that is a tie without
        rounding must stay a tie.
        """
        apart = (a - b).abs()  # infinite or NaN if a number is infinite, which is no tie
        return torch.where(apart.isfinite() & (apart <= 8 * self.to.unit * torch.maximum(a.abs(), b.abs())), b, a)

    def _error(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Tensor | None:
        """Returns the error that an operation makes inside, before it rounds its result. None if it
        makes no such error.
        """
        if not isinstance(result, Tensor) or result.dtype is not torch.float64:
            return None
        if not result.dim() or not result.numel():
            return None
        if name in _SHIFTS:
            return self._shift_error(args, result)
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

    def _shift_error(self, args: Sequence[Any], result: Tensor) -> Tensor | None:
        """Returns the error that is alike for all numbers of a row to which one number is added;
        None if no number is.

        Numbers of float32 are multiples of their spacing. What the added number has beyond such a
        multiple is rounded in the same way for each of them, and does not average out: ``x + 0.1``
        of numbers from 8 to 16 is off by a quarter of their spacing, always upwards.
        """
        others, shift = args[:2] if _is_one_number(args[1], result) else args[1::-1]
        if not _is_one_number(shift, result) or not isinstance(others, Tensor):
            return None
        spacing, own, of_others = (2 * self.to.unit * power_of_two(x) for x in (result, shift, others))
        is_off = (spacing > own) & (torch.remainder(shift, spacing) != 0)
        return torch.minimum(spacing, of_others) / 2 * is_off * self.noise.uniform(shift.shape)

    def _expm1_error(self, result: Tensor) -> Tensor:
        """Returns the error of kernels that do not use ``expm1``. ``exp(x) - 1`` cancels, and
        ``exp(x) - x - 1``, for ``expm1(x) - x``, rounds twice at the size of ``exp(x)``.
        """
        size = result.add(1).clamp(min=1) * self.to.unit
        return size * (self.noise.uniform(result.shape) + self.noise.uniform(result.shape))

    def _normaliser_error(self, name: str, args: Sequence[Any], result: Tensor) -> Tensor:
        """Returns the error of the logarithm of a sum of exponentials. It does not shrink with the
        result, and is the same for a whole row.

        It consists of the rounding of the exponentials and of the logarithm, in float32. For
        ``log_softmax``, the rounding of the logsumexp to the format of results is added: a kernel
        that goes over the vocabulary in parts keeps the logsumexp, and subtracts it from the
        logits. Torch's ``log_softmax`` of bfloat16 on a CPU is such a kernel.
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
        """Returns the error of K terms that are added one by one in float32. Each partial sum is
        rounded, and may be larger than the total; see ``SumOfProducts``.

        Args:
            sums: adds up terms in the same way as the operation.
            terms: the terms; or the two factors of products.
            kwargs: the keyword arguments of the operation.
            total: the result of the operation.
            is_mean: whether the operation divides the sum by K.
        """
        square_sum = sums(*(term.square() for term in terms))
        count = sums(*(torch.ones_like(term) for term in terms))
        if "alpha" in kwargs:  # it multiplies each term
            square_sum = square_sum * kwargs["alpha"] ** 2
        if is_mean:
            count = count * (terms[0].numel() // max(total.numel(), 1))
            square_sum = square_sum / count  # now the squares are divided by K twice, as they must be
        size = (count * (total.square() / 3 + square_sum / 2)).sqrt()
        return size * self.noise.uniform(total.shape) * FLOAT32.unit * (count > 1)


def _is_one_number(x: Any, result: Tensor) -> bool:
    """Returns whether an argument has one number for each row of a result."""
    one = isinstance(x, Tensor) and x.dtype is torch.float64 and (not x.dim() or x.shape[-1] == 1)
    return one and result.shape[-1] > 1


def _on(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], position: int, count: int) -> Callable[..., Tensor]:
    """Returns an operation that adds up, as a function of its terms alone, which it adds to 0. The
    terms are ``count`` arguments from ``position`` on.
    """
    before = (torch.zeros_like(args[0]), *args[1:position]) if position else ()
    after = args[position + count :]
    factors = {key for key, value in kwargs.items() if type(value) in (int, float)}  # alpha, beta
    rest = {key: value for key, value in kwargs.items() if key not in (*factors, "out")}

    def sums(*terms: Tensor) -> Tensor:
        into = {"out": torch.empty_like(kwargs["out"])} if "out" in kwargs else {}
        return func(*before, *terms, *after, **rest, **into)

    return sums


def _write(result: Any, rounded: Any) -> None:
    if isinstance(result, Tensor):
        result.copy_(rounded)


ERRORS = 64
"""The number of errors that are drawn for a run. A loss with more numbers uses them again."""

_ARITHMETIC = """
    add radd sub rsub subtract mul rmul multiply div rdiv divide truediv rtruediv true_divide pow rpow where
    clamp_min clamp_max
"""
_NAMES = frozenset(_ARITHMETIC.split())
_BETWEEN = frozenset(["clamp", "clip"])
_FILLED = frozenset(["full", "full_like", "new_full"])


class RoundNumbers(TorchFunctionMode):
    """Gives the numbers in a loss's code the error of float32: numbers that an operation takes as
    arguments, and numbers with which it fills a tensor.

    The error of a number is drawn once for a run. It is the same for all tokens and wherever the
    code repeats the number, so it does not average out. In a loss that is a small difference, such
    as a divergence of nearly equal distributions, it is the largest error.

    Three kinds of numbers are left alone: those that float32 holds exactly, those of operations in
    place, and those inside a function of torch, such as ``alpha`` of ``add`` or ``label_smoothing``
    of ``cross_entropy``.
    """

    def __init__(self, errors: Tensor, rounding: RoundEveryOperation) -> None:
        """Prepares one run.

        Args:
            errors: ``[ERRORS]`` float64, uniform in [-1, 1).
            rounding: the mode that rounds results. It is paused while numbers are given errors.
        """
        super().__init__()
        self._errors, self._rounding = errors, rounding
        self._seen: dict[float, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = _rounded_name(func), dict(kwargs or {})
        if not name or "out" in kwargs or not any(map(_is_rounded, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if name in _NAMES and _in_float64(args, kwargs):
            held = {key: value if key == "alpha" else self._held(value) for key, value in kwargs.items()}
            return func(*map(self._held, args), **held)
        if name in _BETWEEN and _in_float64(args, kwargs):
            bounds = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
            if any(map(_is_rounded, bounds.values())):  # torch wants both as tensors, or both as numbers
                bounds = {key: self._held(value, always=True) for key, value in bounds.items()}
            return func(args[0], **bounds)
        result = func(*args, **kwargs)
        if name == "masked_fill" and _in_float64(args, kwargs):
            value = kwargs["value"] if "value" in kwargs else args[2]
            mask = kwargs["mask"] if "mask" in kwargs else args[1]
            if _is_rounded(value):
                return torch.where(mask, self._held(value), args[0])
        if name in _FILLED and result.dtype is torch.float64:
            value = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
            if _is_rounded(value):
                return self._held(value).expand(result.shape).clone()
        return result

    def _held(self, number: Any, always: bool = False) -> Any:
        """Returns an argument as a run holds it. A number that float32 rounds becomes a scalar
        tensor with its error. With ``always``, every number becomes a scalar tensor.
        """
        if not _is_rounded(number) and not (always and isinstance(number, int | float)):
            return number
        spacing = 2.0 ** (frexp(number)[1] - 1) * FLOAT32.unit * sqrt(2) if _is_rounded(number) else 0.0
        place = self._seen.setdefault(abs(number), len(self._seen)) % len(self._errors)
        with self._rounding.paused():
            return number + copysign(spacing, number) * self._errors[place]


@cache
def _rounded_name(func: Callable[..., Any]) -> str:
    """Returns the plain name of a torch function, such as "radd" for ``__radd__``, if the numbers
    that it is given are rounded. Empty for other functions, and for functions that work in place.
    """
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.startswith("_"):
        return ""
    plain = name.strip("_")
    return plain if plain in (*_NAMES, *_BETWEEN, *_FILLED, "masked_fill") else ""


def _is_rounded(number: Any) -> bool:
    """Returns whether float32 rounds a number, because it does not hold it exactly."""
    return isinstance(number, float) and isfinite(number) and float(float32(number)) != number


def _in_float64(args: Any, kwargs: Mapping[str, Any]) -> bool:
    return any(isinstance(arg, Tensor) and arg.dtype is torch.float64 for arg in (*args, *kwargs.values()))
