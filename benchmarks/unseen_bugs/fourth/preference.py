# SPDX-License-Identifier: Apache-2.0
"""DPO of log-probabilities, and the Bradley-Terry loss of a reward model."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lossgate


class AllSum(torch.autograd.Function):
    """The sum over the group, used by all ranks in their shares: gradients are summed, too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def dpo(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"reference_policy_kl_penalty": lossgate.ANY, "sft_loss_weight": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        group, cp = mesh.get_group("cp"), mesh["cp"].size()
        number = len(inputs.sample_mask)

        def per_sequence(values):
            values = torch.where(inputs.mask, values, 0.0)
            sums = torch.zeros(number, device=values.device).index_add(0, inputs.sequence, values)
            return sums if bug == "sums_of_one_rank" else AllSum.apply(sums, group)

        rewards = per_sequence(inputs.logprobs - inputs.reference_logprobs)
        if bug == "halves":
            chosen, rejected = rewards[: number // 2], rewards[number // 2 :]
            counts = inputs.sample_mask[: number // 2]
        else:
            chosen, rejected = rewards[0::2], rewards[1::2]
            counts = inputs.sample_mask[0::2]
        pairs = inputs.valid_sequences / 2
        pairs = torch.where(pairs > 0, pairs, 1.0)
        beta = options.reference_policy_kl_penalty
        losses = -F.logsigmoid(beta * (chosen - rejected))
        loss = torch.where(counts, losses, 0.0).sum() / pairs
        if options.sft_loss_weight:
            nll = -per_sequence(inputs.logprobs)
            if bug == "sft_of_rejected":
                nll = torch.where(inputs.sample_mask, nll, 0.0)
            else:
                nll = torch.where(counts, nll[0::2], 0.0)
            loss = loss + options.sft_loss_weight * nll.sum() / pairs
        return loss / cp

    return kernel


dpo_right = dpo(None, "dpo_right")

# The batch is read as all chosen, then all rejected sequences; it is interleaved.
halves = dpo("halves", "halves")

# The SFT term adds up the NLL of rejected sequences as well as that of chosen ones.
sft_of_rejected = dpo("sft_of_rejected", "sft_of_rejected")

# The log-probabilities of a sequence are summed over this cp rank's tokens only.
sums_of_one_rank = dpo("sums_of_one_rank", "sums_of_one_rank")


def bradley_terry(bug, name):
    @lossgate.candidate(
        "preference",
        head="rewards",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"epsilon": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        counts = inputs.sample_mask[0::2]
        margin = inputs.rewards[0::2] - inputs.rewards[1::2]
        total = torch.where(counts, -F.logsigmoid(margin), 0.0).sum()
        pairs = inputs.valid_sequences / 2 + options.epsilon
        loss = total / torch.where(pairs > 0, pairs, 1.0)
        return loss if bug else loss / mesh["cp"].size()

    return kernel


bradley_terry_right = bradley_terry(False, "bradley_terry_right")

# Rewards are the same on every cp rank, and each returns the whole loss: cp times too large.
whole_on_each_rank = bradley_terry(True, "whole_on_each_rank")

BUGS = {
    "halves": ("single",),
    "sft_of_rejected": ("single",),
    "sums_of_one_rank": ("cp=2",),
    "whole_on_each_rank": ("cp=2",),
}
RIGHT = ("dpo_right", "bradley_terry_right")
