# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of a critic that computes its gradient in forward, beside a right one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate

FLOAT32 = ("float32",)


class _FusedValueLoss(torch.autograd.Function):
    """Computes the loss and its gradient in one pass over the values."""

    @staticmethod
    def forward(ctx, values, old, returns, share, cliprange, bug):
        error = values - returns
        losses, slope = error**2 / 2, error
        if cliprange is not None:
            edge = (torch.clamp(values, old - cliprange, old + cliprange) - returns) ** 2 / 2
            free = edge < losses if bug == "smaller error" else edge > losses
            losses = torch.where(free, edge, losses)
            slope = torch.where(free, 0.0, slope)
        ctx.save_for_backward(slope * share)
        ctx.bug = bug
        return (losses * share).sum()

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        if ctx.bug == "upstream of one":
            upstream = torch.ones_like(upstream)
        return gradient * upstream, *(None,) * 5


def _trained_tokens(mask: Tensor, mesh: DeviceMesh, bug: str) -> Tensor:
    """Counts the trained tokens of all ranks, and at least 1."""
    count = mask.sum()
    for axis in ("dp",) if bug == "count over dp" else ("dp", "cp"):
        dist.all_reduce(count, group=mesh.get_group(axis))
    return count.clamp(min=1)


def _value(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    given = inputs.values.float()
    if bug == "prediction of the next":
        given = given.roll(1)
    mask = inputs.mask
    values, old, returns = (torch.where(mask, x, 0.0) for x in (given, inputs.old_values, inputs.returns))
    count = _trained_tokens(mask, mesh, bug)
    share = options.scale * mask / count
    loss = _FusedValueLoss.apply(values, old, returns, share, options.cliprange, bug)

    seen = given.detach() if bug == "all tokens" else given.detach()[mask]
    ends = [seen.amin(), seen.amax()] if len(seen) else [loss.new_tensor(x) for x in (torch.inf, -torch.inf)]
    residuals = (returns - values.detach()) ** 2
    return lossgate.Outputs(
        loss=loss,
        metrics={
            "values_min": ends[0],
            "values_max": ends[1],
            "residual_sq_mean": residuals.sum() / count,
        },
    )


_VALUE: dict[str, Any] = {
    "head": "values",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(("cliprange", "scale"), lossgate.ANY),
}


@lossgate.candidate("value", **_VALUE)
def right_fused_value(inputs, options, mesh):
    """Multiplies the gradient of forward by that of the loss, and counts tokens on all ranks."""
    return _value(inputs, options, mesh)


@lossgate.candidate("value", **_VALUE)
def critic_ignores_upstream(inputs, options, mesh):
    """Backward returns the gradient that forward made, whatever the gradient of the loss is."""
    return _value(inputs, options, mesh, bug="upstream of one")


@lossgate.candidate("value", **_VALUE)
def smaller_of_both_errors(inputs, options, mesh):
    """Of the clipped error and the other one, the loss takes the smaller instead of the larger."""
    return _value(inputs, options, mesh, bug="smaller error")


@lossgate.candidate("value", **_VALUE)
def values_of_previous_token(inputs, options, mesh):
    """Values are moved by one token, as if they were predictions of the next, though each is that
    of its own token.
    """
    return _value(inputs, options, mesh, bug="prediction of the next")


@lossgate.candidate("value", **_VALUE)
def extreme_values_of_prompts_too(inputs, options, mesh):
    """The smallest and largest value are those of all tokens, also of such that are not trained."""
    return _value(inputs, options, mesh, bug="all tokens")


@lossgate.candidate("value", **_VALUE)
def count_reduced_over_dp_alone(inputs, options, mesh):
    """The count of trained tokens is summed over data-parallel ranks, and not over context-parallel
    ones.
    """
    return _value(inputs, options, mesh, bug="count over dp")


BUGS = {
    "critic_ignores_upstream": ("single", "dp=2"),
    "smaller_of_both_errors": ("single",),
    "values_of_previous_token": ("single", "cp=2"),
    "extreme_values_of_prompts_too": ("single", "dp=2"),
    "count_reduced_over_dp_alone": ("cp=2", "dp=2,cp=2"),
}
RIGHT = ("right_fused_value",)
