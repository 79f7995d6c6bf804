# SPDX-License-Identifier: Apache-2.0
"""Distillation: divergences over a split vocabulary, and the KL over a teacher's top-k."""

import math

import torch
import torch.distributed as dist

import lossgate


def parallel_logprobs(z, group):
    """The log-softmax of rows whose columns are split over the group."""
    top = z.amax(dim=1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    z = z - top[:, None]
    total = z.exp().sum(dim=1)
    dist.all_reduce(total, group=group)
    return z - total.log()[:, None]


class VocabParallelDivergence(torch.autograd.Function):
    """Forward KL, reverse KL or JSD of split logits, whose gradient is computed in closed form."""

    @staticmethod
    def forward(ctx, logits, teacher, mask, denominator, kind, beta, temperature, columns, group, bug):
        rows = ~mask[:, None]
        logq = parallel_logprobs(logits[:, :columns].masked_fill(rows, 0.0) / temperature, group)
        logp = parallel_logprobs(teacher[:, :columns].masked_fill(rows, 0.0) / temperature, group)
        p, q = logp.exp(), logq.exp()
        if kind == "forward":
            losses = (p * (logp - logq)).sum(dim=1)
            dist.all_reduce(losses, group=group)
            grad = q - p
        else:
            if kind == "reverse":
                weight, ratio = 1.0, logq - logp
                from_teacher = torch.zeros_like(q[:, 0]) if columns else q.new_zeros(q.shape[0])
            else:
                logr = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
                weight, ratio = 1 - beta, logq - logr
                from_teacher = beta * (p * (logp - logr)).sum(dim=1)
            centre = (q * ratio).sum(dim=1)
            whole = centre.clone()
            dist.all_reduce(whole, group=group)
            dist.all_reduce(from_teacher, group=group)
            losses = from_teacher + weight * whole
            if bug != "centred_by_the_shard":
                centre = whole
            grad = weight * q * (ratio - centre[:, None])
        ctx.save_for_backward(grad, mask, denominator)
        ctx.rest = temperature, columns, logits.shape[1]
        return losses.masked_fill(~mask, 0.0).sum() / denominator

    @staticmethod
    def backward(ctx, upstream):
        grad, mask, denominator = ctx.saved_tensors
        temperature, columns, width = ctx.rest
        d = grad.new_zeros(grad.shape[0], width)
        d[:, :columns] = grad * (upstream / (denominator * temperature))
        return d.masked_fill(~mask[:, None], 0.0), *(None,) * 9


def divergence_of(bug, name):
    @lossgate.candidate(
        "divergence",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={
            "divergence_type": lossgate.ANY,
            "beta": lossgate.ANY,
            "temperature": lossgate.ANY,
            "vocab_split": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        return VocabParallelDivergence.apply(
            inputs.logits,
            inputs.teacher_logits,
            inputs.mask,
            inputs.valid_tokens.clamp(min=1),
            options.divergence_type,
            options.beta,
            options.temperature,
            inputs.vocab_end - inputs.vocab_start,
            mesh.get_group("tp"),
            bug,
        )

    return kernel


split_divergence = divergence_of(None, "split_divergence")

# The gradient of the reverse KL and of the JSD, q (log-ratio - KL), takes the sum over this rank's
# columns for the KL: the copy that is all-reduced goes into the loss alone.
centred_by_the_shard = divergence_of("centred_by_the_shard", "centred_by_the_shard")


def topk_of(bug, name):
    @lossgate.candidate(
        "distill",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={
            "kl_type": lossgate.ANY,
            "mixed_kl_weight": lossgate.ANY,
            "temperature": lossgate.ANY,
            "bias": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        keep = inputs.mask[:, None]
        hidden = inputs.hidden.masked_fill(~keep, 0.0)
        ids = inputs.teacher_indices
        # Only the rows of the lm-head that the teacher names are multiplied.
        student = torch.einsum("th,tkh->tk", hidden, inputs.weight[ids])
        if inputs.bias is not None:
            student = student + inputs.bias[ids]
        teacher = inputs.teacher_logits.masked_fill(~keep, 0.0)
        logq = torch.log_softmax(student / options.temperature, dim=-1)
        logp = torch.log_softmax(teacher / options.temperature, dim=-1)
        forward = (logp.exp() * (logp - logq)).sum(dim=-1)
        reverse = (logq.exp() * (logq - logp)).sum(dim=-1)
        if options.kl_type == "forward":
            kl = forward
        elif options.kl_type == "reverse":
            kl = reverse
        else:
            kl = torch.lerp(reverse, forward, options.mixed_kl_weight)
        if bug == "temperature_squared":
            kl = kl * options.temperature**2
        return kl.masked_fill(~inputs.mask, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


top_rows = topk_of(None, "top_rows")

# The loss has Hinton's factor of the squared temperature, which this loss does not have.
temperature_squared = topk_of("temperature_squared", "temperature_squared")

BUGS = {
    "centred_by_the_shard": ("tp=2",),
    "temperature_squared": ("single",),
}
RIGHT = ("split_divergence", "top_rows")
