# SPDX-License-Identifier: Apache-2.0
"""Fused operations, spelled out in those that a kernel runs: so that each of them rounds.

The result of a fused operation may be far smaller than what it is computed from: the logarithm of
a sum that is nearly 1, a sum of gradients that cancel. Errors inside are then far larger than the
rounding of the result.
"""

from collections.abc import Callable, Mapping
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


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    return torch.maximum(a, b) + (-(a - b).abs()).exp().log1p()


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + value * (a * b)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + value * (a / b)


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start + weight * (end - start)


SPELLED_OUT: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_softmax": _softmax,
        "addcdiv": _addcdiv,
        "addcmul": _addcmul,
        "lerp": _lerp,
        "logaddexp": _logaddexp,
        "_softmax_backward_data": _softmax_backward,
        "_log_softmax_backward_data": _log_softmax_backward,
        "sigmoid_backward": _sigmoid_backward,
        "tanh_backward": _tanh_backward,
    }
)
"""By the name of the operation, without ``aten::``."""
