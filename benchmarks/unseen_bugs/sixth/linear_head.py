# SPDX-License-Identifier: Apache-2.0
"""Fused linear cross entropy in chunks of tokens over a vocabulary-parallel lm-head."""

import torch
import torch.distributed as dist

import lossgate


class LinearLogprobs(torch.autograd.Function):
    """log p(label) of every token. Logits live for one chunk of tokens, forward and backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature, rows, start, group, chunk, bug):
        matrix = weight[:rows].float()
        offset = None if bias is None else bias[:rows].float()
        local = labels - start
        owned = (local >= 0) & (local < rows)
        local = local.clamp(0, rows - 1)
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        lse = torch.empty_like(logprobs)
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            z = scaled(hidden[part], matrix, offset, temperature)
            top = z.amax(1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            picked = torch.where(owned[part], z.gather(1, local[part, None])[:, 0], 0.0)
            sums = torch.stack([(z - top[:, None]).exp().sum(1), picked])
            dist.all_reduce(sums, group=group)
            lse[part] = sums[0].log() + top
            logprobs[part] = sums[1] - lse[part]
        ctx.save_for_backward(hidden, weight, bias, local, owned, lse)
        ctx.settings = temperature, rows, group, chunk, bug
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        hidden, weight, bias, local, owned, lse = ctx.saved_tensors
        temperature, rows, group, chunk, bug = ctx.settings
        matrix = weight[:rows].float()
        offset = None if bias is None else bias[:rows].float()
        d_hidden = torch.empty_like(hidden, dtype=torch.float32)
        d_weight = torch.zeros_like(weight, dtype=weight.dtype if bug == "accumulate" else torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for i in range(0, len(hidden), chunk):
            part = slice(i, i + chunk)
            p = (scaled(hidden[part], matrix, offset, temperature) - lse[part, None]).exp()
            p.scatter_add_(1, local[part, None], -owned[part, None].float())
            dz = p.mul_(-upstream[part, None].float())
            if bug != "temperature":
                dz /= temperature
            d_hidden[part] = dz @ matrix
            d_weight[:rows] += (dz.T @ hidden[part].float()).to(d_weight.dtype)
            if d_bias is not None:
                d_bias[:rows] += dz.sum(0)
        dist.all_reduce(d_hidden, group=group)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), d_bias, *(None,) * 7


def scaled(hidden, matrix, offset, temperature):
    z = hidden.float() @ matrix.T
    return (z if offset is None else z + offset) / temperature


def logprobs_of(inputs, mesh, temperature, chunk, bug):
    hidden = inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0)
    rows = inputs.vocab_end - inputs.vocab_start
    return LinearLogprobs.apply(
        hidden,
        inputs.weight,
        inputs.bias,
        inputs.labels,
        temperature,
        rows,
        inputs.vocab_start,
        mesh.get_group("tp"),
        chunk,
        bug,
    )


def tempered_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="hidden",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY, "bias": lossgate.ANY},
        differentiable=("logprobs",),
        tiles={"token": 8},
        name=name,
    )
    def kernel(inputs, options, mesh):
        return lossgate.Outputs(logprobs=logprobs_of(inputs, mesh, options.temperature, 8, bug))

    return kernel


def trained_of(bug, name, chunk=2, dtypes=("bfloat16",)):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp", "tp"),
        dtypes=dtypes,
        tiles={"token": chunk},
        name=name,
    )
    def kernel(inputs, options, mesh):
        logprobs = logprobs_of(inputs, mesh, 1.0, chunk, bug)
        total = -torch.where(inputs.mask, logprobs, 0.0).sum()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


AVERAGE = {"dp": "avg"}


def averaged_of(bug, name):
    """The trainer averages gradients over data-parallel ranks, so the loss is scaled up by their
    number.
    """

    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"reduction": lossgate.ANY, "bias": lossgate.ANY},
        contract=lossgate.Contract(loss=AVERAGE, grads={"hidden": AVERAGE, "weight": AVERAGE, "bias": AVERAGE}),
        tiles={"token": 8},
        name=name,
    )
    def kernel(inputs, options, mesh):
        logprobs = logprobs_of(inputs, mesh, 1.0, 8, bug)
        loss = -torch.where(inputs.mask, logprobs, 0.0).sum()
        if options.reduction == "mean":
            loss = loss / inputs.valid_tokens.clamp(min=1)
        processes = mesh.size() if bug == "world" else mesh["dp"].size()
        return loss * processes

    return kernel


tempered = tempered_of(None, "tempered")
trained = trained_of(None, "trained")
averaged = averaged_of(None, "averaged")

# Forward divides the logits by the temperature, but backward returns the gradient with respect to
# the tempered logits as that of the raw ones. Its author would have to divide dz by the temperature
# in backward.
gradient_without_inverse_temperature = tempered_of("temperature", "gradient_without_inverse_temperature")

# To undo the trainer's average over data-parallel ranks the loss is multiplied by the size of the
# world, in which tensor- and context-parallel ranks count too. Its author would have to multiply by
# the size of dp alone.
loss_times_world_size = averaged_of("world", "loss_times_world_size")

# The gradient of the weight is added up over chunks in the weight's own dtype, bfloat16, while the
# declared precision is a float32 accumulator. Its author would have to accumulate in float32 and
# cast once at the end.
weight_gradient_accumulated_bf16 = trained_of("accumulate", "weight_gradient_accumulated_bf16")

BUGS = {
    "gradient_without_inverse_temperature": ("single", "tp=2"),
    "loss_times_world_size": ("tp=2", "dp=2,cp=2"),
    "weight_gradient_accumulated_bf16": ("single", "cp=2"),
}
RIGHT = {
    "tempered": ("single", "tp=2"),
    "averaged": ("tp=2", "dp=2,cp=2"),
    "trained": ("single", "cp=2"),
}
