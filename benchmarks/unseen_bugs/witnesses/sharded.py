# SPDX-License-Identifier: Apache-2.0
"""Wrong log-probabilities where each rank has columns of the logits."""

import torch
import torch.distributed as dist

import lossgate


class VocabParallelLogprobs(torch.autograd.Function):
    """Log-probabilities of labels and entropies, of this rank's columns of the logits."""

    @staticmethod
    def forward(ctx, logits, labels, start, group, bug):
        own = logits.amax(-1)
        top = own.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total = (logits - (own if bug == "own_maximum" else top)[:, None]).exp().sum(-1)
        dist.all_reduce(total, group=group)
        lse = top + total.log()
        if bug == "equal_shards":
            start = dist.get_rank(group) * logits.shape[-1]
        local = labels - start
        inside = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        picked = torch.where(inside, logits.gather(1, local[:, None]).squeeze(1), 0.0)
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


def statistics(logits, inputs, mesh, bug=None):
    """Log-probabilities and entropies; 0 where a token is not trained."""
    logits = torch.where(inputs.mask[:, None], logits, 0.0)
    found = VocabParallelLogprobs.apply(logits, inputs.labels, inputs.vocab_start, mesh.get_group("tp"), bug)
    return [torch.where(inputs.mask, each, 0.0) for each in found]


def mean_nll(logits, inputs, mesh, bug=None):
    return -statistics(logits, inputs, mesh, bug)[0].sum() / inputs.valid_tokens.clamp(min=1)


# Each shard subtracts its own maximum, but the sums are added as if all had subtracted the same.
@lossgate.candidate("nll", head="logits", axes=("dp", "cp", "tp"), dtypes=("float32",))
def own_maximum(inputs, options, mesh):
    return mean_nll(inputs.logits, inputs, mesh, "own_maximum")


# The shard starts at rank * its own size, which is wrong where tp does not divide the vocabulary.
@lossgate.candidate("nll", head="logits", axes=("dp", "cp", "tp"), dtypes=("float32",))
def equal_shards(inputs, options, mesh):
    return mean_nll(inputs.logits, inputs, mesh, "equal_shards")


# Each rank's gradient of the hidden states is that of its own columns. The parts are never added
# up: the author would sum them over tp in backward.
@lossgate.candidate("nll", head="hidden", axes=("dp", "cp", "tp"), dtypes=("float32",))
def hidden_not_reduced(inputs, options, mesh):
    hidden = torch.where(inputs.mask[:, None], inputs.hidden, 0.0)
    return mean_nll(hidden @ inputs.weight.T, inputs, mesh)


# In backward the entropy of each shard stands for that of the whole row.
@lossgate.candidate(
    "token_logprobs",
    head="logits",
    axes=("dp", "cp", "tp"),
    dtypes=("float32",),
    differentiable=("logprobs", "token_entropy"),
)
def entropy_backward_local(inputs, options, mesh):
    logprobs, entropy = statistics(inputs.logits, inputs, mesh, "entropy_backward_local")
    return lossgate.Outputs(logprobs=logprobs, token_entropy=entropy)


BUGS = {
    "own_maximum": ("tp=2",),
    "equal_shards": ("tp=2",),
    "hidden_not_reduced": ("tp=2",),
    "entropy_backward_local": ("tp=2",),
}
