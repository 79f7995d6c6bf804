# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel kernels: log-probabilities with entropies, and z-loss from hidden states."""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

import lossgate


def summed(x, group):
    dist.all_reduce(x, group=group)
    return x


class ShardedLogprobs(torch.autograd.Function):
    """Log-probability of the label and entropy; backward rebuilds the softmax from the logits."""

    @staticmethod
    def prepare(logits, temperature, softcap):
        if softcap is None:
            return logits / temperature, None
        bent = torch.tanh(logits / softcap)
        return softcap * bent / temperature, bent

    @staticmethod
    def forward(ctx, logits, labels, start, temperature, softcap, group, bug):
        z, _ = ShardedLogprobs.prepare(logits, temperature, softcap)
        top = z.amax(dim=1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        exps = (z - top[:, None]).exp()
        norm = summed(exps.sum(dim=1), group)
        lse = top + norm.log()
        local = labels - start
        mine = (local >= 0) & (local < z.shape[1])
        picked = z.gather(1, local.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        target = summed(torch.where(mine, picked, 0.0), group)
        probs = exps / norm[:, None]
        entropy = summed(-(probs * (z - lse[:, None])).sum(dim=1), group)
        ctx.save_for_backward(logits, local, mine, lse, entropy)
        ctx.settings = temperature, softcap, bug
        return target - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, local, mine, lse, entropy = ctx.saved_tensors
        temperature, softcap, bug = ctx.settings
        z, bent = ShardedLogprobs.prepare(logits, temperature, softcap)
        logp = z - lse[:, None]
        probs = logp.exp()
        grad = -probs * grad_logprobs[:, None]
        rows = mine.nonzero()[:, 0]
        grad[rows, local[rows]] += grad_logprobs[rows]
        if bug != "entropy":
            grad -= grad_entropy[:, None] * probs * (logp + entropy[:, None])
        grad /= temperature
        if bent is not None and bug != "slope":
            grad *= 1 - bent * bent
        return grad, None, None, None, None, None, None


def logprobs_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="logits",
        axes=("dp", "tp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY, "softcap": lossgate.ANY},
        differentiable=("logprobs", "token_entropy"),
        name=name,
    )
    def kernel(inputs, options, mesh):
        rows = inputs.vocab_end - inputs.vocab_start
        logits = inputs.logits[:, :rows].masked_fill(~inputs.mask[:, None], 0.0)
        logprobs, entropy = ShardedLogprobs.apply(
            logits,
            inputs.labels,
            inputs.vocab_start,
            options.temperature,
            options.softcap,
            mesh.get_group("tp"),
            bug,
        )
        return lossgate.Outputs(logprobs=logprobs, token_entropy=entropy)

    return kernel


class ShardedZLoss(torch.autograd.Function):
    """Sum of -log p(y) + w lse^2 over trained tokens, from hidden states and rows of the head."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, mask, start, z_weight, group):
        hidden = torch.where(mask[:, None], hidden, 0.0)
        logits = hidden @ weight.T
        top = logits.amax(dim=1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        lse = top + summed((logits - top[:, None]).exp().sum(dim=1), group).log()
        local = labels - start
        mine = (local >= 0) & (local < weight.shape[0])
        picked = logits.gather(1, local.clamp(0, weight.shape[0] - 1)[:, None])[:, 0]
        target = summed(torch.where(mine, picked, 0.0), group)
        ctx.save_for_backward(hidden, weight, local, mine & mask, mask, lse)
        ctx.z_weight, ctx.group = z_weight, group
        return torch.where(mask, lse - target + z_weight * lse * lse, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden, weight, local, hit, mask, lse = ctx.saved_tensors
        dlogits = (hidden @ weight.T - lse[:, None]).exp() * (1 + 2 * ctx.z_weight * lse)[:, None]
        rows = hit.nonzero()[:, 0]
        dlogits[rows, local[rows]] -= 1.0
        dlogits = torch.where(mask[:, None], dlogits, 0.0) * grad
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            dhidden = summed(dlogits @ weight, ctx.group)
        if ctx.needs_input_grad[1]:
            dweight = dlogits.T @ hidden
        return dhidden, dweight, None, None, None, None, None


def z_loss_of(bug, name):
    @lossgate.candidate(
        "z_loss",
        head="hidden",
        axes=("dp", "tp"),
        dtypes=("float32",),
        supports={"z_loss_weight": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        hidden = inputs.hidden.detach() if bug == "detach" else inputs.hidden
        rows = inputs.vocab_end - inputs.vocab_start
        total = ShardedZLoss.apply(
            hidden,
            inputs.weight[:rows],
            inputs.labels,
            inputs.mask,
            inputs.vocab_start,
            options.z_loss_weight,
            mesh.get_group("tp"),
        )
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


sharded_logprobs = logprobs_of(None, "sharded_logprobs")
sharded_z_loss = z_loss_of(None, "sharded_z_loss")

# Backward uses the upstream gradient of the log-probabilities alone and drops that of the second
# output, the entropy. Its author would have to add -grad_entropy p (log p + H).
entropy_gradient_dropped = logprobs_of("entropy", "entropy_gradient_dropped")

# Backward goes straight through the soft-cap, as if its slope were 1. Its author would have to
# multiply the gradient of the logits by 1 - tanh(z / cap)^2.
softcap_slope_left_out = logprobs_of("slope", "softcap_slope_left_out")

# The hidden states are detached before the fused head, so that no gradient gets to the backbone;
# that of the weight is right. Its author would have to take out the detach.
hidden_states_detached = z_loss_of("detach", "hidden_states_detached")

BUGS = {
    "entropy_gradient_dropped": ("single", "tp=2"),
    "softcap_slope_left_out": ("tp=2", "tp=3"),
    "hidden_states_detached": ("single", "tp=2"),
}
RIGHT = {"sharded_logprobs": ("single", "tp=2", "tp=3"), "sharded_z_loss": ("single", "tp=2")}
