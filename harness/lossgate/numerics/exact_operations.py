# SPDX-License-Identifier: Apache-2.0
"""Which operations of torch round their result, and which only select, move, compare or fill."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from lossgate.numerics.dispatched import argument_names, base_name

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
"""They make numbers. ``RoundNumbers`` rounds those that float32 does not hold."""

_EXACT = frozenset(f"{_MOVES} {_SELECTIONS} {_SIGNS_AND_WHOLES} {_TRUTHS} {_CONSTANTS}".split())


def name_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns what an operation does: its name; with what it does to numbers that meet, if it is
    asked that: ``scatter_reduce sum``.
    """
    name = base_name(operation)
    return f"{name} {kwargs['reduce'] if 'reduce' in kwargs else args[4]}" if name == "scatter_reduce" else name


@cache
def is_view(operation: Any) -> bool:
    """Returns whether what an operation returns shares memory with an argument that it only reads,
    or would but for a copy.

    A view in place, such as ``squeeze_``, says that it writes. It only changes the shape.
    """
    aliases = [value.alias_info for value in operation._schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return True
    return any(is_view(twin) for twin in _twins(operation))


def _twins(operation: Any) -> list[Any]:
    """Returns what a view in place, or as a copy, does without that: ``squeeze`` of ``squeeze_``
    and of ``squeeze_copy``.
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
        args: its arguments. Some operations add numbers up only if they are asked to.
        kwargs: likewise.
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
    names = argument_names(operation)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if "accumulate" in names:
        return bool(given.get("accumulate", False))
    return given["reduce"] not in ("amax", "amin")
