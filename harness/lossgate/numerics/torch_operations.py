# SPDX-License-Identifier: Apache-2.0
"""Tells which operations of torch round their result, and spells out fused operations.

Operations that only select, move, compare or fill do not round. The result of a fused operation may
be far smaller than the numbers inside: the logarithm of a sum that is nearly 1, or a sum of
gradients that cancel. Its errors are then far larger than the rounding of the result. So fused
operations are spelled out in the smaller operations that a kernel runs, each of which rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from math import inf
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class DispatchMode(TorchDispatchMode):
    """The base of modes that see each operation, in forward and in backward."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes seconds and is of no use here."""
        return False


def unobserved() -> AbstractContextManager[Any]:
    """Turns off all modes, so that they do not take lossgate's own operations for the kernel's."""
    return _disable_current_modes()


@cache
def base_name(operation: Any) -> str:
    """Returns the plain name of an operation, also of one in place: ``add`` for
    ``aten::add_.Tensor``.
    """
    return operation._schema.name.removeprefix("aten::").rstrip("_")


@cache
def argument_names(operation: Any) -> tuple[str, ...]:
    """Returns the names of an operation's arguments, in order."""
    return tuple(argument.name for argument in operation._schema.arguments)


def arguments_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, with the defaults of those that are not given."""
    names = argument_names(operation)
    return {**_defaults(operation), **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _defaults(operation: Any) -> dict[str, Any]:
    arguments = operation._schema.arguments
    return {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}


_MOVES = """
    _conj_physical _reshape_alias _to_copy _unsafe_view cat channel_shuffle clone constant_pad_nd contiguous diag
    diag_embed flip gather index index_select lift lift_fresh masked_select permute pixel_shuffle
    im2col pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d resize_as roll rot90 stack take
    take_along_dim tril triu unsafe_chunk unsafe_split unsafe_split_with_sizes where
    copy fill index_copy index_fill masked_fill masked_scatter scatter select_scatter slice_scatter diagonal_scatter
    as_strided_scatter zero set resize select_backward slice_backward diagonal_backward
    value_selecting_reduction_backward embedding block_diag
"""
"""They copy numbers from one place to another."""

_SELECTIONS = """
    amax amin aminmax cummax cummin fmax fmin kthvalue max maximum median min minimum mode nanmedian sort topk
    clamp clamp_max clamp_min hardshrink hardtanh relu threshold threshold_backward hardtanh_backward nan_to_num
    _unique2 unique_consecutive unique_dim unique_dim_consecutive max_pool2d_with_indices max_pool3d_with_indices
"""
"""Their results are some of their inputs."""

_SIGNS_AND_WHOLES = "abs ceil copysign floor frac heaviside neg positive round sgn sign trunc"

_TRUTHS = """
    eq ge gt isfinite isinf isnan isneginf isposinf le logical_and logical_not logical_or logical_xor lt ne signbit
"""
"""They write 0 or 1, into floats if they work in place."""

_CONSTANTS = """
    arange empty empty_like empty_strided eye full full_like new_empty new_empty_strided new_full new_ones new_zeros
    ones ones_like scalar_tensor zeros zeros_like
"""
"""They make new numbers. ``RoundNumbers`` rounds the numbers that float32 does not hold."""

_EXACT = frozenset(f"{_MOVES} {_SELECTIONS} {_SIGNS_AND_WHOLES} {_TRUTHS} {_CONSTANTS}".split())


def name_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the name of an operation. That of ``scatter_reduce`` has the kind of reduction, too:
    ``scatter_reduce sum``.
    """
    name = base_name(operation)
    if name != "scatter_reduce":
        return name
    return f"{name} {kwargs['reduce'] if 'reduce' in kwargs else args[4]}"


@cache
def is_view(operation: Any) -> bool:
    """Returns whether an operation returns a view of an argument, or a copy of such a view.

    A view in place, such as ``squeeze_``, counts too: its schema says that it writes, but it only
    changes the shape.
    """
    aliases = [value.alias_info for value in operation._schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return True
    return any(is_view(twin) for twin in _twins(operation))


def _twins(operation: Any) -> list[Any]:
    """Returns the overloads of the plain version of an operation: those of ``squeeze`` for
    ``squeeze_`` and ``squeeze_copy``. Empty for an operation that has no such version.
    """
    own = operation._schema.name.removeprefix("aten::")
    name = own.rstrip("_").removesuffix("_copy")
    packet = getattr(torch.ops.aten, name, None) if name != own else None
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


@cache
def writes(operation: Any) -> bool:
    """Returns whether an operation returns an argument that it has written to."""
    aliases = [value.alias_info for value in operation._schema.returns]
    return any(alias is not None and alias.is_write for alias in aliases)


def rounds(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operation may round its results.

    Args:
        operation: an overload, as a dispatch mode gets it.
        args, kwargs: the arguments. They decide whether some operations add up, and so round.
    """
    known = _rounds(operation)
    return _adds_up(operation, args, kwargs) if known is None else known


@cache
def _rounds(operation: Any) -> bool | None:
    """Returns whether an operation rounds; None if that depends on its arguments."""
    name = base_name(operation)
    if name in ("index_put", "_index_put_impl", "put", "scatter_reduce", "index_reduce"):
        return None
    if name == "scatter":  # with reduce= it adds or multiplies
        return "reduce" in operation._schema.overload_name
    return not is_view(operation) and name not in _EXACT


def _adds_up(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operation adds or multiplies the numbers that it writes to one place."""
    names = argument_names(operation)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "accumulate" in names:
        return bool(given.get("accumulate", False))
    return given["reduce"] not in ("amax", "amin")


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
    gap = (a - b).nan_to_num(nan=0.0, posinf=inf, neginf=-inf)  # the difference of equal infinities is NaN
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
    if isinstance(dim, int):
        return [dim]
    return list(dim or range(x.dim()))


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
"""Fused operations in smaller ones, by the name that ``name_of`` gives."""
