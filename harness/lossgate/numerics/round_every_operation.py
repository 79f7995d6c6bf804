# SPDX-License-Identifier: Apache-2.0
"""Runs torch code in float64 as if each operation rounded.

The ensemble runs the loss stage of any spec this way, as the reference has it.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from lossgate.numerics.dispatched import DispatchMode
from lossgate.numerics.exact_operations import is_view, name_of, rounds, writes
from lossgate.numerics.float_formats import FLOAT32, FloatFormat, coarsest
from lossgate.numerics.fused_operations import SPELLED_OUT
from lossgate.numerics.noise import Noise

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
