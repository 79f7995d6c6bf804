# SPDX-License-Identifier: Apache-2.0
"""Losses on pairs: DPO and IPO, and the Bradley-Terry loss of reward models."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import lossgate


class SumOverRanks(torch.autograd.Function):
    """Adds up over a group; every rank uses the sum, so backward adds up as well."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream):
        total = upstream.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def pairs(inputs):
    return (inputs.valid_sequences.float() / 2).clamp(min=0.5)


def counted(inputs):
    """Trained tokens of the pairs that count, and which pairs these are."""
    gate = inputs.sample_mask[0::2]
    return inputs.mask & gate.repeat_interleave(2)[inputs.sequence], gate


def by_sequence(x, inputs):
    return x.new_zeros(inputs.sample_mask.shape[0]).index_add(0, inputs.sequence, x)


def preference_of(margin, o):
    if o.loss_type == "ipo":
        return (margin - 0.5 / o.reference_policy_kl_penalty).square()
    return F.softplus(-o.reference_policy_kl_penalty * margin)


def dpo_of_logprobs(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        name=name,
        supports={
            "loss_type": lossgate.ANY,
            "reference_policy_kl_penalty": lossgate.ANY,
            "preference_loss_weight": lossgate.ANY,
        },
    )
    def kernel(inputs, options, mesh):
        cp = mesh.get_group("cp")
        trained, gate = counted(inputs)
        policy = by_sequence(torch.where(trained, inputs.logprobs.float(), 0.0), inputs)
        reference = by_sequence(torch.where(trained, inputs.reference_logprobs, 0.0), inputs)
        policy = SumOverRanks.apply(policy, cp)
        if bug != "dpo_reference_of_rank":
            dist.all_reduce(reference, group=cp)
        reward = policy - reference
        losses = torch.where(gate, preference_of(reward[0::2] - reward[1::2], options), 0.0)
        # Every cp rank has the whole loss, and the caller adds them up.
        return options.preference_loss_weight * losses.sum() / pairs(inputs) / cp.size()

    return kernel


def dpo_of_logits(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logits",
        axes=("dp",),
        dtypes=("float32",),
        name=name,
        supports={
            "loss_type": lossgate.ANY,
            "preference_average_log_probs": lossgate.ANY,
            "sft_loss_weight": lossgate.ANY,
            "temperature": lossgate.ANY,
        },
    )
    def kernel(inputs, options, mesh):
        trained, gate = counted(inputs)
        logits = torch.where(trained[:, None], inputs.logits.float(), 0.0) / options.temperature
        logprobs = -F.cross_entropy(logits, inputs.labels, reduction="none")
        policy = by_sequence(torch.where(trained, logprobs, 0.0), inputs)
        reference = by_sequence(torch.where(trained, inputs.reference_logprobs, 0.0), inputs)
        nll = torch.where(gate, -policy[0::2], 0.0).sum()
        if options.preference_average_log_probs:
            lengths = by_sequence(trained.float(), inputs).clamp(min=1.0)
            policy = policy / lengths
            if bug != "dpo_reference_not_averaged":
                reference = reference / lengths
        reward = policy - reference
        losses = torch.where(gate, preference_of(reward[0::2] - reward[1::2], options), 0.0)
        return (losses.sum() + options.sft_loss_weight * nll) / pairs(inputs)

    return kernel


def reward_model(bug, name):
    @lossgate.candidate(
        "preference",
        head="rewards",
        axes=("dp", "cp"),
        dtypes=("float32",),
        name=name,
        supports={"epsilon": lossgate.ANY},
    )
    def kernel(inputs, options, mesh):
        rewards, keep = inputs.rewards.float(), inputs.sample_mask
        if bug == "bt_halves":
            half = rewards.shape[0] // 2
            chosen, rejected, gate = rewards[:half], rewards[half:], keep[:half]
        else:
            chosen, rejected, gate = rewards[0::2], rewards[1::2], keep[0::2]
        margin = torch.where(gate, chosen - rejected, 0.0)
        total = torch.where(gate, F.softplus(-margin), 0.0).sum()
        count = inputs.valid_sequences.float() / 2 + options.epsilon
        loss = total / torch.where(count == 0, 1.0, count)
        # Ranks of cp have the same rewards, and the caller adds up their losses.
        copies = mesh.size() if bug == "bt_all_ranks" else mesh.get_group("cp").size()
        return loss / copies

    return kernel


dpo_logprobs = dpo_of_logprobs("", "dpo_logprobs")
dpo_logits = dpo_of_logits("", "dpo_logits")
bt_rewards = reward_model("", "bt_rewards")

# Over cp only the policy's log-probabilities of a sequence are added up; those of the reference
# stay the sum over this rank's tokens.
dpo_reference_of_rank = dpo_of_logprobs("dpo_reference_of_rank", "dpo_reference_of_rank")

# With preference_average_log_probs only the policy's log-probabilities are averaged; the
# reference's are summed.
dpo_reference_not_averaged = dpo_of_logits("dpo_reference_not_averaged", "dpo_reference_not_averaged")

# Takes the first half of the sequences for the chosen ones and the second half for the rejected
# ones, as TRL lays them out; here they alternate.
bt_halves = reward_model("bt_halves", "bt_halves")

# The loss is divided by the number of all ranks, and not by that of cp, whose ranks have the same
# pairs: it is dp times too small.
bt_all_ranks = reward_model("bt_all_ranks", "bt_all_ranks")

BUGS = {
    "dpo_reference_of_rank": ("cp=2",),
    "dpo_reference_not_averaged": ("single",),
    "bt_halves": ("single",),
    "bt_all_ranks": ("dp=2", "dp=2,cp=2"),
}
RIGHT = ("dpo_logprobs", "dpo_logits", "bt_rewards")
