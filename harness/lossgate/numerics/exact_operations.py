# SPDX-License-Identifier: Apache-2.0
"""Which operations of torch round their result, and which only select, move, compare or fill."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lossgate.numerics.dispatched import argument_names, base_name

_MOVES = """
    _conj_physical _reshape_alias _to_copy _unsafe_view cat channel_shuffle clone constant_pad_nd contiguous diag
    diag_embed flip gather index index_select lift lift_fresh masked_select permute pixel_shuffle
    reflection_pad1d reflection_pad2d repeat repeat_interleave replication_pad1d replication_pad2d roll rot90 stack take
    take_along_dim tril triu unsafe_chunk unsafe_split unsafe_split_with_sizes where
    copy fill index_copy index_fill masked_fill masked_scatter scatter select_scatter slice_scatter diagonal_scatter
    as_strided_scatter zero set resize select_backward slice_backward diagonal_backward
    value_selecting_reduction_backward embedding
"""
"""They copy numbers from one place to another."""

_SELECTIONS = """
    amax amin aminmax cummax cummin fmax fmin kthvalue max maximum median min minimum mode nanmedian sort topk
    clamp clamp_max clamp_min hardtanh relu threshold nan_to_num
"""
"""Their results are some of their inputs."""

_SIGNS_AND_WHOLES = "abs ceil copysign floor frac heaviside neg positive round sgn sign trunc"

_CONSTANTS = """
    arange empty empty_like empty_strided eye full full_like new_empty new_empty_strided new_full new_ones new_zeros
    ones ones_like scalar_tensor zeros zeros_like
"""
"""They make numbers. ``RoundNumbers`` rounds those that float32 does not hold."""

_EXACT = frozenset(f"{_MOVES} {_SELECTIONS} {_SIGNS_AND_WHOLES} {_CONSTANTS}".split())


def name_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns what an operation does: its name; with what it does to numbers that meet, if it is
    asked that: ``scatter_reduce sum``.
    """
    name = base_name(operation)
    return f"{name} {kwargs['reduce'] if 'reduce' in kwargs else args[4]}" if name == "scatter_reduce" else name


@cache
def is_view(operation: Any) -> bool:
    """Returns whether what an operation returns shares memory with an argument that it only
    reads.
    """
    aliases = [value.alias_info for value in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


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
    if name in ("index_put", "_index_put_impl", "scatter_reduce", "index_reduce"):
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
