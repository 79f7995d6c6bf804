# SPDX-License-Identifier: Apache-2.0
"""DPO: of packed logits split over cp, of one sequence after the other, and of a scan over padded
rows.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lossgate


class SumOverRanks(torch.autograd.Function):
    """Every rank goes on to compute the same loss, so a rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def pair_loss(rewards, inputs, options):
    margins = rewards[0::2] - rewards[1::2]
    beta = options.reference_policy_kl_penalty
    losses = (margins - 1 / (2 * beta)).square() if options.loss_type == "ipo" else -F.logsigmoid(beta * margins)
    return over_pairs(losses, inputs)


def over_pairs(losses, inputs):
    total = torch.where(inputs.sample_mask[0::2], losses, 0.0).sum()
    return total / (inputs.valid_sequences / 2).clamp(min=0.5)


def packed_of(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"reference_policy_kl_penalty": lossgate.ANY, "temperature": lossgate.ANY},
        contract=lossgate.Contract(loss={"cp": "replicate"}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        cp = mesh["cp"].size()
        ends = inputs.cu_seqlens_padded[1:] // cp  # of sequences in this rank's tokens
        positions = torch.arange(len(inputs.labels), dtype=ends.dtype)
        segments = torch.searchsorted(ends, positions, right=bug != "edge")
        z = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0) / options.temperature
        logprobs = z.gather(1, inputs.labels[:, None])[:, 0] - z.logsumexp(1)
        log_ratios = torch.where(inputs.mask, logprobs - inputs.reference_logprobs, 0.0)
        sums = log_ratios.new_zeros(len(inputs.sample_mask)).index_add(0, segments, log_ratios)
        sums = SumOverRanks.apply(sums, mesh.get_group("cp"))
        return pair_loss(sums, inputs, options)

    return kernel


def sequences_of(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logits",
        axes=("dp",),
        dtypes=("float32",),
        supports={
            "sft_loss_weight": lossgate.ANY,
            "sft_average_log_probs": lossgate.ANY,
            "preference_loss_weight": lossgate.ANY,
        },
        name=name,
    )
    def kernel(inputs, options, mesh):
        lengths = inputs.cu_seqlens_padded.diff().tolist()
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0)
        parts = zip(
            *(x.split(lengths) for x in (logits, inputs.labels, inputs.mask, inputs.reference_logprobs)), strict=True
        )
        rewards, nlls = [], []
        for i, (z, labels, mask, reference) in enumerate(parts):
            log_softmax = torch.log_softmax(z, 1)
            logprobs = log_softmax.gather(1, labels[:, None])[:, 0]
            rewards.append(torch.where(mask, logprobs - reference, 0.0).sum())
            if i % 2 == 0:
                if bug == "shift":
                    log_softmax, labels, mask = log_softmax[:-1], labels[1:], mask[1:]
                nll = -torch.where(mask, log_softmax.gather(1, labels[:, None])[:, 0], 0.0).sum()
                nlls.append(nll / mask.sum().clamp(min=1) if options.sft_average_log_probs else nll)
        if not rewards:
            return logits.sum() * 0
        loss = options.preference_loss_weight * pair_loss(torch.stack(rewards), inputs, options)
        return loss + options.sft_loss_weight * over_pairs(torch.stack(nlls), inputs)

    return kernel


def rewards_to_go(rewards, mask, bug):
    """The sum of what follows at every token of padded rows, from the last token to the first."""
    running = rewards.new_zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        running = running + rewards[:, t]
        columns.append(running)
        if bug == "reset":
            running = running * mask[:, t]
    return torch.stack(columns[::-1], 1)


def scanned_of(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logprobs",
        axes=("dp",),
        dtypes=("float32",),
        supports={"reference_policy_kl_penalty": lossgate.ANY, "loss_type": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        lengths = inputs.cu_seqlens_padded.diff().tolist()
        if not sum(lengths):
            return pair_loss(inputs.logprobs.sum().expand(len(lengths)), inputs, options)
        logprobs = torch.where(inputs.mask, inputs.logprobs, 0.0)
        reference = torch.where(inputs.mask, inputs.reference_logprobs, 0.0)
        rows = torch.nn.utils.rnn.pad_sequence((logprobs - reference).split(lengths), batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence(inputs.mask.split(lengths), batch_first=True)
        first = mask.long().argmax(1)  # of the response
        totals = rewards_to_go(rows, mask, bug).gather(1, first[:, None])[:, 0]
        return pair_loss(totals, inputs, options)

    return kernel


packed = packed_of(None, "packed")
sequences = sequences_of(None, "sequences")
scanned = scanned_of(None, "scanned")

# The number of each token's sequence is searched for in the cumulative lengths on the wrong side,
# so that the first token of every sequence counts to the sequence before. Its author would have to
# search with right=True.
segment_edge_searchsorted_side = packed_of("edge", "segment_edge_searchsorted_side")

# The NLL of the chosen responses shifts logits and labels once more, although the labels are those
# of the next token already; the preference term does not. Its author would have to drop the [:-1]
# and [1:] from the NLL.
chosen_nll_shifted_twice = sequences_of("shift", "chosen_nll_shifted_twice")

# The running sum over a sequence is set to 0 at every masked token, so that what follows a masked
# span (such as a tool's output) is lost to the tokens before it. Its author would have to let the
# sum run on there. The report is of discounted returns, which no spec computes: here it is the scan
# that sums the log-ratios of a response.
running_sum_reset_at_mask = scanned_of("reset", "running_sum_reset_at_mask")

BUGS = {
    "segment_edge_searchsorted_side": ("single", "dp=2,cp=2"),
    "chosen_nll_shifted_twice": ("single", "dp=2"),
    "running_sum_reset_at_mask": ("single", "dp=2"),
}
RIGHT = {
    "packed": ("single", "dp=2,cp=2"),
    "sequences": ("single", "dp=2"),
    "scanned": ("single", "dp=2"),
}
