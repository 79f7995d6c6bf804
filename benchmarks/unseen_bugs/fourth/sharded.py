# SPDX-License-Identifier: Apache-2.0
"""Kernels for a vocabulary that is split over tp, in the style of Megatron."""

import torch
import torch.distributed as dist

import lossgate


class CopyTo(torch.autograd.Function):
    """The identity, whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFrom(torch.autograd.Function):
    """The sum over the group; its gradient is the identity, or a sum again."""

    @staticmethod
    def forward(ctx, x, group, sum_backward):
        ctx.group, ctx.sum_backward = group, sum_backward
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        if ctx.sum_backward:
            grad = grad.clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class VocabParallelLogprobs(torch.autograd.Function):
    """Log-probabilities of labels and entropies, of this rank's columns of the logits."""

    @staticmethod
    def forward(ctx, logits, labels, start, group, bug):
        top = logits.amax(-1)
        if bug == "own_maximum":
            shifted = (logits - top[:, None]).exp().sum(-1)
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        else:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            shifted = (logits - top[:, None]).exp().sum(-1)
        dist.all_reduce(shifted, group=None if bug == "world_group" else group)
        lse = top + shifted.log()
        if bug == "equal_shards":
            start = dist.get_rank(group) * logits.shape[-1]
        local = labels - start
        inside = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        picked = logits.gather(1, local[:, None]).squeeze(1)
        if bug != "label_of_others":
            picked = torch.where(inside, picked, 0.0)
        dist.all_reduce(picked, group=group)
        logp = logits - lse[:, None]
        own_entropy = -(logp.exp() * logp).sum(-1)
        entropy = own_entropy.clone()
        dist.all_reduce(entropy, group=group)
        ctx.save_for_backward(logp, local, inside, own_entropy if bug == "entropy_backward_local" else entropy)
        return picked - lse, entropy

    @staticmethod
    def backward(ctx, d_logprobs, d_entropy):
        logp, local, inside, entropy = ctx.saved_tensors
        p = logp.exp()
        grad = -p * d_logprobs[:, None]
        grad.scatter_add_(1, local[:, None], torch.where(inside, d_logprobs, 0.0)[:, None])
        grad -= p * (logp + entropy[:, None]) * d_entropy[:, None]
        return grad, None, None, None, None


def mean_nll(logits, inputs, mesh, bug):
    logits = torch.where(inputs.mask[:, None], logits, 0.0)
    logprobs, _ = VocabParallelLogprobs.apply(logits, inputs.labels, inputs.vocab_start, mesh.get_group("tp"), bug)
    return -torch.where(inputs.mask, logprobs, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


def linear(bug, name):
    @lossgate.candidate("nll", head="hidden", axes=("dp", "cp", "tp"), dtypes=("float32",), name=name)
    def kernel(inputs, options, mesh):
        hidden = torch.where(inputs.mask[:, None], inputs.hidden, 0.0)
        weight = inputs.weight
        if bug != "hidden_not_reduced":
            hidden = CopyTo.apply(hidden, mesh.get_group("tp"))
        if bug == "weight_reduced_over_cp":
            weight = CopyTo.apply(weight, mesh.get_group("cp"))
        return mean_nll(hidden @ weight.T, inputs, mesh, bug)

    return kernel


def on_logits(bug, name):
    @lossgate.candidate("nll", head="logits", axes=("dp", "cp", "tp"), dtypes=("float32",), name=name)
    def kernel(inputs, options, mesh):
        return mean_nll(inputs.logits, inputs, mesh, bug)

    return kernel


def per_token(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        differentiable=("logprobs", "token_entropy"),
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = torch.where(inputs.mask[:, None], inputs.logits, 0.0)
        logprobs, entropy = VocabParallelLogprobs.apply(
            logits, inputs.labels, inputs.vocab_start, mesh.get_group("tp"), bug
        )
        return lossgate.Outputs(logprobs=logprobs, token_entropy=entropy)

    return kernel


def by_autograd(bug, name):
    @lossgate.candidate("nll", head="logits", axes=("dp", "cp", "tp"), dtypes=("float32",), name=name)
    def kernel(inputs, options, mesh):
        group = mesh.get_group("tp")
        logits = torch.where(inputs.mask[:, None], inputs.logits, 0.0)
        top = logits.detach().amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        lse = top + ReduceFrom.apply((logits - top[:, None]).exp().sum(-1), group, bug).log()
        local = inputs.labels - inputs.vocab_start
        inside = (local >= 0) & (local < logits.shape[-1])
        picked = logits.gather(1, local.clamp(0, logits.shape[-1] - 1)[:, None]).squeeze(1)
        picked = ReduceFrom.apply(torch.where(inside, picked, 0.0), group, bug)
        return torch.where(inputs.mask, lse - picked, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


linear_nll = linear(None, "linear_nll")
logits_nll = on_logits(None, "logits_nll")
logprobs_entropy = per_token(None, "logprobs_entropy")
autograd_nll = by_autograd(False, "autograd_nll")

# The gradient of the hidden states is that of this rank's rows: no all-reduce over tp.
hidden_not_reduced = linear("hidden_not_reduced", "hidden_not_reduced")

# The kernel sums the gradient of the weight over cp, which the trainer does, too.
weight_reduced_over_cp = linear("weight_reduced_over_cp", "weight_reduced_over_cp")

# Each shard subtracts its own maximum, but the sums are added as if all had subtracted the same.
own_maximum = on_logits("own_maximum", "own_maximum")

# The shard starts at rank * its own size, which is wrong where tp does not divide the vocabulary.
equal_shards = on_logits("equal_shards", "equal_shards")

# The sum of exponentials is all-reduced over all ranks, not over the tp group.
world_group = on_logits("world_group", "world_group")

# Labels of other shards are clamped into this one, and their logit is not set to zero.
label_of_others = per_token("label_of_others", "label_of_others")

# The backward of the entropy subtracts this shard's part of the entropy, not the whole.
entropy_backward_local = per_token("entropy_backward_local", "entropy_backward_local")

# All-reduces over tp sum in backward, too, though all ranks have the same loss: gradients x tp.
reduced_in_backward = by_autograd(True, "reduced_in_backward")

BUGS = {
    "hidden_not_reduced": ("tp=2",),
    "weight_reduced_over_cp": ("cp=2,tp=2",),
    "own_maximum": ("tp=2",),
    "equal_shards": ("tp=2",),
    "world_group": ("cp=2,tp=2",),
    "label_of_others": ("tp=2",),
    "entropy_backward_local": ("tp=2",),
    "reduced_in_backward": ("tp=2", "cp=2,tp=2"),
}
RIGHT = ("linear_nll", "logits_nll", "logprobs_entropy", "autograd_nll")
