# SPDX-License-Identifier: Apache-2.0
"""Losses of pairs: DPO over context-parallel ranks and over padded rows, and a reward model's."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

import lossgate


class SumOverRanks(torch.autograd.Function):
    """An all-reduce whose backward is the identity: every rank has the same loss behind it."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def preference_terms(chosen, chosen_ref, rejected, rejected_ref, beta):
    return -F.logsigmoid(beta * ((chosen - chosen_ref) - (rejected - rejected_ref)))


def pair_loss(margin_loss, nll, gate, pairs, compute_nll, preference_weight, alpha=1.0):
    """The preference loss, plus alpha times the NLL of the chosen responses."""
    loss = preference_weight * torch.where(gate, margin_loss, 0.0).sum() / pairs
    if compute_nll:
        loss = loss + alpha * torch.where(gate, nll, 0.0).sum() / pairs
    return loss


def dpo_cp_of(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        contract=lossgate.Contract(loss={"cp": "replicate"}),
        supports={
            "reference_policy_kl_penalty": lossgate.ANY,
            "sft_loss_weight": lossgate.ANY,
            "preference_loss_weight": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        gate = inputs.sample_mask[0::2]
        mask = inputs.mask & gate.repeat_interleave(2)[inputs.sequence]
        of_tokens = torch.stack(
            [torch.where(mask, inputs.logprobs, 0.0), torch.where(mask, inputs.reference_logprobs, 0.0)], dim=1
        )
        sums = of_tokens.new_zeros(inputs.sample_mask.shape[0], 2).index_add(0, inputs.sequence, of_tokens)
        policy, reference = SumOverRanks.apply(sums, mesh.get_group("cp")).unbind(1)
        margin_loss = preference_terms(
            policy[0::2], reference[0::2], policy[1::2], reference[1::2], options.reference_policy_kl_penalty
        )
        given = {} if bug == "alpha" else {"alpha": options.sft_loss_weight}
        return pair_loss(
            margin_loss,
            -policy[0::2],
            gate,
            inputs.valid_sequences.clamp(min=1) / 2,
            options.sft_loss_weight > 0,
            options.preference_loss_weight,
            **given,
        )

    return kernel


def dpo_rows_of(bug, name):
    """Over padded rows of chosen and rejected responses."""

    @lossgate.candidate(
        "dpo",
        head="logits",
        axes=("dp",),
        dtypes=("float32",),
        supports={"reference_policy_kl_penalty": lossgate.ANY, "sft_loss_weight": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        lengths = inputs.cu_seqlens_padded.diff().tolist()
        if not lengths:
            return inputs.logits[:0].sum()
        gate = inputs.sample_mask[0::2]
        mask = inputs.mask & gate.repeat_interleave(2)[inputs.sequence]
        logits = inputs.logits.masked_fill(~mask[:, None], 0.0)
        logprobs = -F.cross_entropy(logits, inputs.labels, reduction="none")
        values = (torch.where(mask, x, 0.0) for x in (logprobs, inputs.reference_logprobs))
        policy, reference = (pad_sequence(x.split(lengths), batch_first=True) for x in values)
        pairs = inputs.valid_sequences.clamp(min=1) / 2
        margin_loss = preference_terms(
            policy[0::2].sum(1),
            reference[0::2].sum(1),
            policy[1::2].sum(1),
            reference[1::2].sum(1),
            options.reference_policy_kl_penalty,
        )
        loss = torch.where(gate, margin_loss, 0.0).sum() / pairs
        if options.sft_loss_weight > 0:
            nll = -policy[0::2]
            batch = pairs * nll.size(1) if bug == "batchmean" else pairs
            loss = loss + options.sft_loss_weight * nll.sum() / batch
        return loss

    return kernel


AVERAGE = {"dp": "avg"}


def reward_model_of(bug, name):
    """The loss of a batch shard as a weighted mean; the trainer averages over dp."""

    @lossgate.candidate(
        "preference",
        head="rewards",
        axes=("dp",),
        dtypes=("float32",),
        contract=lossgate.Contract(loss=AVERAGE, grads={"rewards": AVERAGE}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        gate = inputs.sample_mask[0::2]
        chosen, rejected = torch.where(gate.repeat_interleave(2), inputs.rewards, 0.0).view(-1, 2).unbind(1)
        weighted = torch.where(gate, F.softplus(rejected - chosen), 0.0).sum()
        if bug == "shard":
            return weighted / (inputs.sample_mask.sum() / 2).clamp(min=0.5)
        return weighted * mesh["dp"].size() / (inputs.valid_sequences / 2).clamp(min=0.5)

    return kernel


dpo_cp = dpo_cp_of(None, "dpo_cp")
dpo_rows = dpo_rows_of(None, "dpo_rows")
reward_model = reward_model_of(None, "reward_model")

# The weight of the chosen responses' NLL, alpha, is not passed on, so the loss has it with the
# default of 1. Its author would have to forward sft_loss_weight as alpha.
alpha_is_not_forwarded = dpo_cp_of("alpha", "alpha_is_not_forwarded")

# "batchmean" divides a [B, T] tensor by B T, where B was meant (moved from a distillation loss to
# NLL of chosen responses, which is a sum over tokens and a mean over pairs). Its author would have
# to leave out the width of the padded rows.
batchmean_divides_by_width = dpo_rows_of("batchmean", "batchmean_divides_by_width")

# The weighted mean is that of this rank's shard, divided by its own sum of weights, and then the
# ranks are averaged (moved from class weights to the weights 0 and 1 of sample_mask). Its author
# would have to divide by the sum of weights of all ranks.
shard_weighted_mean_averaged = reward_model_of("shard", "shard_weighted_mean_averaged")

BUGS = {
    "alpha_is_not_forwarded": ("single", "cp=2"),
    "batchmean_divides_by_width": ("single", "dp=2"),
    "shard_weighted_mean_averaged": ("dp=2", "dp=3"),
}
RIGHT = {"dpo_cp": ("single", "cp=2"), "dpo_rows": ("single", "dp=2"), "reward_model": ("dp=2", "dp=3")}
