# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of value models, recreated from public reports."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate

FLOAT32 = ("float32",)


class _MaskedMean(torch.autograd.Function):
    """Divides the sum over this rank's trained tokens by those of the batch."""

    @staticmethod
    def forward(ctx, losses, mask, count, ranks, bug):
        divisor = mask.sum().clamp(min=1) * ranks if bug == "own count" else count
        ctx.save_for_backward(mask / divisor)
        return torch.where(mask, losses, 0.0).sum() / count

    @staticmethod
    def backward(ctx, upstream):
        (share,) = ctx.saved_tensors
        return share * upstream, None, None, None, None


def _value(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    values = inputs.values.float()
    losses = (values - inputs.returns) ** 2
    if options.cliprange is None:
        losses = 0.5 * losses
    else:
        moved = (values - inputs.old_values).clamp(-options.cliprange, options.cliprange)
        clipped = (inputs.old_values + moved - inputs.returns) ** 2
        half = 0.5 * losses
        losses = torch.maximum(half, clipped if bug == "half of one" else 0.5 * clipped)
    losses = torch.where(inputs.mask, losses, 0.0)
    ranks = mesh.get_group("dp").size() * mesh.get_group("cp").size()
    return options.scale * _MaskedMean.apply(losses, inputs.mask, inputs.valid_tokens.clamp(min=1), ranks, bug)


_VALUE = dict.fromkeys(("cliprange", "scale"), lossgate.ANY)


@lossgate.candidate("value", head="values", axes=("dp", "cp"), dtypes=FLOAT32, supports=_VALUE)
def right_value(inputs, options, mesh):
    """Halves the larger of both squares, and divides by the trained tokens of the batch."""
    return _value(inputs, options, mesh)


@lossgate.candidate("value", head="values", axes=("dp", "cp"), dtypes=FLOAT32, supports=_VALUE)
def half_of_unclipped_square_alone(inputs, options, mesh):
    """The half is a factor of the unclipped square alone, so the clipped one counts twice."""
    return _value(inputs, options, mesh, bug="half of one")


@lossgate.candidate("value", head="values", axes=("dp", "cp"), dtypes=FLOAT32, supports=_VALUE)
def critic_gradient_by_own_count(inputs, options, mesh):
    """Backward divides by the rank's own trained tokens times the ranks, unlike forward.

    In backward alone.
    """
    return _value(inputs, options, mesh, bug="own count")


BUGS = {
    "half_of_unclipped_square_alone": ("single",),
    "critic_gradient_by_own_count": ("dp=2", "cp=2"),
}
RIGHT = ("right_value",)
