# SPDX-License-Identifier: Apache-2.0
"""Clipped value losses of PPO's critic."""

import torch
import torch.distributed as dist

import lossgate

OPTIONS = {"cliprange": lossgate.ANY, "scale": lossgate.ANY, "epsilon": lossgate.ANY}


class ReportSum(torch.autograd.Function):
    """Adds up over a group. Each rank's gradient is that of its own part, so backward copies."""

    @staticmethod
    def forward(ctx, x, group, bug):
        ctx.group, ctx.bug = group, bug
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream):
        if ctx.bug == "value_reduced_twice":
            upstream = upstream.clone()
            dist.all_reduce(upstream, group=ctx.group)
        return upstream, None, None


def share(inputs, options, bug):
    """This rank's part of the loss."""
    mask = inputs.mask
    v, old, target = (torch.where(mask, x, 0.0) for x in (inputs.values.float(), inputs.old_values, inputs.returns))
    error = (v - target).square()
    if options.cliprange is not None:
        moved = v - old
        clipped_error = (old + moved.clamp(-options.cliprange, options.cliprange) - target).square()
        if bug == "value_clip_always":
            error = torch.where(moved.abs() > options.cliprange, clipped_error, error)
        else:
            error = torch.maximum(error, clipped_error)
    count = inputs.valid_tokens.float() + options.epsilon
    return 0.5 * options.scale * error.masked_fill(~mask, 0.0).sum() / torch.where(count == 0, 1.0, count)


def local_kernel(bug, name):
    @lossgate.candidate("value", head="values", axes=("dp", "cp"), dtypes=("float32",), supports=OPTIONS, name=name)
    def kernel(inputs, options, mesh):
        return share(inputs, options, bug)

    return kernel


def reduced_kernel(bug, name):
    whole = {"dp": "replicate", "cp": "replicate"}

    @lossgate.candidate(
        "value",
        head="values",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports=OPTIONS,
        name=name,
        contract=lossgate.Contract(loss=whole),
    )
    def kernel(inputs, options, mesh):
        loss = share(inputs, options, bug)
        for axis in ("dp", "cp"):
            if mesh.get_group(axis).size() > 1:
                loss = ReportSum.apply(loss, mesh.get_group(axis), bug)
        return loss

    return kernel


value_local = local_kernel("", "value_local")
value_reduced = reduced_kernel("", "value_reduced")

# Takes the clipped error wherever the value left the range, and not the larger of the two errors:
# a value that moved away from its return gets the smaller error, and no gradient.
value_clip_always = local_kernel("value_clip_always", "value_clip_always")

# The loss is added up over ranks in forward, and the gradient once more in backward, so that
# gradients are as many times too large as there are ranks; the loss is right.
value_reduced_twice = reduced_kernel("value_reduced_twice", "value_reduced_twice")

BUGS = {
    "value_clip_always": ("single",),
    "value_reduced_twice": ("dp=2", "cp=2"),
}
RIGHT = ("value_local", "value_reduced")
