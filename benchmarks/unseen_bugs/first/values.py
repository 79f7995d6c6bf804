# SPDX-License-Identifier: Apache-2.0
"""Value losses of a critic, fused and over packs of tokens, right and wrong."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import ValueValues
from lossgate.options import ValueOptions

OPTIONS = dict.fromkeys(("cliprange", "scale", "epsilon"), lossgate.ANY)


def _count(inputs: ValueValues, options: ValueOptions) -> Tensor:
    count = inputs.valid_tokens.float() + options.epsilon
    return torch.where(count > 0, count, 1.0)


# A fused loss.

FUSED: dict[str, Any] = {"head": "values", "axes": ("dp", "cp"), "dtypes": ("float32",), "supports": OPTIONS}


class _ClippedValueLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None, bug: str
    ) -> Tensor:
        values, old, returns = (torch.where(mask, given.float(), 0.0) for given in (values, old, returns))
        error = values - returns
        losses, grad = error.square() / 2, error
        if clip is not None:
            clipped = torch.clamp(values, old - clip, old + clip) - returns
            larger = clipped.square() > error.square()
            losses = torch.where(larger, clipped.square() / 2, losses)
            grad = torch.where(larger, clipped if bug == "straight_through" else 0.0, error)
        ctx.save_for_backward(grad)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.saved_tensors[0], None, None, None, None, None


def _fused(inputs: ValueValues, options: ValueOptions, bug: str = "") -> Tensor:
    given = (inputs.values, inputs.old_values, inputs.returns, inputs.mask)
    total = _ClippedValueLoss.apply(*given, options.cliprange, bug)
    return options.scale * total / _count(inputs, options)


@lossgate.candidate("value", **FUSED)
def value_right(inputs: ValueValues, options: ValueOptions, mesh: DeviceMesh) -> Tensor:
    """Gives no gradient to values whose clipped error is the larger."""
    return _fused(inputs, options)


@lossgate.candidate("value", **FUSED)
def clipped_values_get_gradient(inputs: ValueValues, options: ValueOptions, mesh: DeviceMesh) -> Tensor:
    """Where the clipped error is the larger, backward passes its gradient through the clamp."""
    return _fused(inputs, options, bug="straight_through")


# Packs that a trainer splits over context-parallel ranks itself.

PACKS: dict[str, Any] = {
    "head": "values",
    "tokens": "packed",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": OPTIONS,
}


def _zigzag(whole: Tensor, starts: list[int], rank: int, size: int) -> Tensor:
    if size == 1:
        return whole
    parts = [whole[:0]]
    for begin, end in pairwise(starts):
        width = (end - begin) // (2 * size)
        for turn in (rank, 2 * size - 1 - rank):
            parts.append(whole[begin + turn * width : begin + (turn + 1) * width])
    return torch.cat(parts)


def _packed(inputs: ValueValues, options: ValueOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("cp")
    place = (inputs.cu_seqlens_padded.tolist(), group.rank(), group.size())
    old, mask = (_zigzag(whole[0], *place) for whole in (inputs.old_values, inputs.mask))
    if bug == "returns_in_order":
        returns = inputs.returns[0].tensor_split(group.size())[group.rank()]
    else:
        returns = _zigzag(inputs.returns[0], *place)

    values, old, returns = (torch.where(mask, given.float(), 0.0) for given in (inputs.values, old, returns))
    errors = (values - returns).square()
    if options.cliprange is not None:
        clipped = torch.clamp(values, old - options.cliprange, old + options.cliprange)
        errors = torch.maximum(errors, (clipped - returns).square())
    return options.scale / 2 * torch.where(mask, errors, 0.0).sum() / _count(inputs, options)


@lossgate.candidate("value", **PACKS)
def value_packs_right(inputs: ValueValues, options: ValueOptions, mesh: DeviceMesh) -> Tensor:
    """Splits all that belongs to tokens in the same zigzag."""
    return _packed(inputs, options, mesh)


@lossgate.candidate("value", **PACKS)
def returns_split_in_order(inputs: ValueValues, options: ValueOptions, mesh: DeviceMesh) -> Tensor:
    """The returns are split over the ranks end to end, and everything else in a zigzag."""
    return _packed(inputs, options, mesh, bug="returns_in_order")


BUGS = {
    "clipped_values_get_gradient": ("single",),
    "returns_split_in_order": ("cp=2",),
}
RIGHT = ("value_right", "value_packs_right")
