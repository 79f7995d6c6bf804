# SPDX-License-Identifier: Apache-2.0
"""Fused operations, spelled out in those that a kernel runs: so that each of them rounds.

The result of a fused operation may be far smaller than what it is computed from: the logarithm of
a sum that is nearly 1, a sum of gradients that cancel. Errors inside are then far larger than the
rounding of the result.
"""

from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.log_softmax(x, dim).exp()


def _softmax_backward(gradient: Tensor, p: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return p * (gradient - (gradient * p).sum(dim, keepdim=True))


def _log_softmax_backward(gradient: Tensor, log_p: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return gradient - log_p.exp() * gradient.sum(dim, keepdim=True)


def _sigmoid_backward(gradient: Tensor, y: Tensor) -> Tensor:
    return gradient * (1 - y) * y


def _tanh_backward(gradient: Tensor, y: Tensor) -> Tensor:
    return gradient * (1 - y * y)


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    y = x.sigmoid()
    return gradient * (y * (1 + x * (1 - y)))


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    p = x if eps is None else x.clamp(eps, 1 - eps)
    return (p / (1 - p)).log()


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    gap = (a - b).nan_to_num(nan=0.0, posinf=inf, neginf=-inf)  # of two that are infinite alike, it is NaN
    return torch.maximum(a, b) + (-gap.abs()).exp().log1p()


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + value * (a * b)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + value * (a / b)


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start + weight * (end - start)


def _nansum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=inf, neginf=-inf).sum(_dims(x, dim), keepdim, dtype=dtype)


def _vector_norm(
    x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims, sizes = _dims(x, dim), x.abs() if dtype is None else x.to(dtype).abs()
    if abs(order) == inf:
        return sizes.amax(dims, keepdim) if order > 0 else sizes.amin(dims, keepdim)
    if order == 0:
        return (sizes != 0).sum(dims, keepdim).to(sizes.dtype)
    if order == 2:
        return sizes.square().sum(dims, keepdim).sqrt()
    return sizes.pow(order).sum(dims, keepdim).pow(1 / order)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    mean = x.mean(dims, keepdim=True)
    count = x.numel() // max(mean.numel(), 1) - (1 if correction is None else correction)
    squares = (x - mean).square().sum(dims, keepdim)
    return squares / max(count, 0), mean if keepdim else mean.sum(dims)


def _var(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _std_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return var.sqrt(), mean


def _scatter_mean(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
    count = torch.ones_like(x, dtype=torch.int64)
    if not include_self:
        x, count = x.scatter(dim, index, 0.0), count.scatter(dim, index, 0)
    count = count.scatter_reduce(dim, index, torch.ones_like(src, dtype=torch.int64), "sum").clamp(min=1)
    return x.scatter_reduce(dim, index, src, "sum") / count


def _dims(x: Tensor, dim: Any) -> list[int]:
    """Returns the dims that an operation reduces: all, if it names none."""
    return [dim] if isinstance(dim, int) else list(dim) if dim else list(range(x.dim()))


SPELLED_OUT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_softmax": _softmax,
        "addcdiv": _addcdiv,
        "addcmul": _addcmul,
        "lerp": _lerp,
        "logaddexp": _logaddexp,
        "logit": _logit,
        "silu_backward": _silu_backward,
        "_softmax_backward_data": _softmax_backward,
        "_log_softmax_backward_data": _log_softmax_backward,
        "sigmoid_backward": _sigmoid_backward,
        "tanh_backward": _tanh_backward,
        "scatter_reduce mean": _scatter_mean,
        "nansum": _nansum,
        "linalg_vector_norm": _vector_norm,
        "var": _var,
        "var_mean": _var_mean,
        "std": _std,
        "std_mean": _std_mean,
    }
)
"""By the name of the operation, as ``name_of`` gives it."""
