# SPDX-License-Identifier: Apache-2.0
"""DPO with a vocabulary-parallel head and with split sequences, a value loss in micro-batches."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import lossgate

ROWS = 8


class _TpLinearLogprobs(torch.autograd.Function):
    """Log-probabilities from hidden states and this rank's rows of the head; keeps no logits for
    backward.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, start, group):
        lse, target = hidden.new_empty(len(labels)), hidden.new_zeros(len(labels))
        mine = (labels >= start) & (labels < start + len(weight))
        local = (labels - start).clamp(0, len(weight) - 1)
        for first in range(0, len(labels), ROWS):
            rows = slice(first, first + ROWS)
            z = hidden[rows] @ weight.T
            lse[rows] = z.logsumexp(1)
            target[rows] = torch.where(mine[rows], z.gather(1, local[rows, None])[:, 0], 0.0)
        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        both = torch.stack(((lse - top).exp(), target))
        dist.all_reduce(both, group=group)
        lse = top + both[0].log()
        ctx.save_for_backward(hidden, weight, lse, mine, local)
        ctx.group = group
        return both[1] - lse

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, lse, mine, local = ctx.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for first in range(0, len(lse), ROWS):
            rows = slice(first, first + ROWS)
            g = grad[rows, None]
            dz = -(hidden[rows] @ weight.T - lse[rows, None]).exp() * g
            dz.scatter_add_(1, local[rows, None], torch.where(mine[rows, None], g, 0.0))
            d_hidden[rows] = dz @ weight
            d_weight.addmm_(dz.T, hidden[rows])
        dist.all_reduce(d_hidden, group=ctx.group)
        return d_hidden, d_weight, None, None, None


def _pair_losses(chosen, rejected, reference_chosen, reference_rejected, loss_type="sigmoid", beta=0.1):
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    return F.softplus(-beta * margin)


def _sequence_sums(x, mask, sequence, n):
    return x.new_zeros(n).index_add(0, sequence, torch.where(mask, x, 0.0))


def fused_dpo_of(bug, name):
    @lossgate.candidate(
        "dpo",
        head="hidden",
        axes=("dp", "tp"),
        dtypes=("float32",),
        supports={
            "reference_policy_kl_penalty": lossgate.ANY,
            "loss_type": lossgate.ANY,
            "preference_loss_weight": lossgate.ANY,
        },
        tiles={"token": ROWS},
        name=name,
    )
    def kernel(inputs, options, mesh):
        n = len(inputs.sample_mask)
        gate = inputs.sample_mask[0::2]
        mask = inputs.mask & gate.repeat_interleave(2)[inputs.sequence]
        hidden = inputs.hidden.masked_fill(~mask[:, None], 0.0)
        logprobs = _TpLinearLogprobs.apply(
            hidden, inputs.weight, inputs.labels, inputs.vocab_start, mesh.get_group("tp")
        )
        policy = _sequence_sums(logprobs, mask, inputs.sequence, n)
        reference = _sequence_sums(inputs.reference_logprobs, mask, inputs.sequence, n)
        given = {"loss_type": options.loss_type}
        if bug != "default":
            given["beta"] = options.reference_policy_kl_penalty
        of_pair = _pair_losses(policy[0::2], policy[1::2], reference[0::2], reference[1::2], **given)
        pairs = inputs.valid_sequences / 2
        loss = torch.where(gate, of_pair, 0.0).sum() / torch.where(pairs == 0, 1, pairs)
        return options.preference_loss_weight * loss

    return kernel


fused_dpo = fused_dpo_of(None, "fused_dpo")

# As in TRL #7062: label smoothing and tau are not forwarded to Liger's DPO. The spec has no label
# smoothing, but tau is its beta: the wrapper forwards the loss type alone, so the loss takes its
# own default of 0.1. The author would have to pass beta on.
beta_not_forwarded_default_used = fused_dpo_of("default", "beta_not_forwarded_default_used")


class _SumOver(torch.autograd.Function):
    """The sum over ranks that then all compute the same; backward passes the gradient on."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def split_dpo_of(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"reference_policy_kl_penalty": lossgate.ANY, "sft_loss_weight": lossgate.ANY},
        contract=lossgate.Contract(loss={"cp": "replicate"}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        group, n = mesh.get_group("cp"), len(inputs.sample_mask)
        gate, mask = inputs.sample_mask[0::2], inputs.mask
        of_rank = (inputs.logprobs, inputs.reference_logprobs, mask.to(inputs.logprobs.dtype))
        sums = torch.stack([_sequence_sums(x, mask, inputs.sequence, n) for x in of_rank])
        policy, reference, tokens = _SumOver.apply(sums, group)
        of_pair = _pair_losses(
            policy[0::2],
            policy[1::2],
            reference[0::2],
            reference[1::2],
            beta=options.reference_policy_kl_penalty,
        )
        sft = -policy[0::2]
        if bug == "mean":
            sft = sft / tokens[0::2].clamp(min=1)
        loss = torch.where(gate, of_pair + options.sft_loss_weight * sft, 0.0).sum()
        pairs = inputs.valid_sequences / 2
        return loss / torch.where(pairs == 0, 1, pairs)

    return kernel


split_dpo = split_dpo_of(None, "split_dpo")

# As in verl #931: seq-mean-token-sum. The NLL of the chosen responses should be the sum over the
# tokens of each and then the mean over sequences, but the sum is divided by the tokens of the
# sequence. The author would have to leave the sum as it is.
sequence_sum_divided_by_tokens = split_dpo_of("mean", "sequence_sum_divided_by_tokens")


def value_of(bug, name):
    @lossgate.candidate(
        "value",
        head="values",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"cliprange": lossgate.ANY, "scale": lossgate.ANY},
        tiles={"token": ROWS},
        name=name,
    )
    def kernel(inputs, options, mesh):
        count = inputs.valid_tokens.clamp(min=1)
        everything = (inputs.values, inputs.old_values, inputs.returns)
        everything = [torch.where(inputs.mask, x, 0.0) for x in everything]
        losses, rows_of_metrics = [], []
        for values, old, returns, mask in zip(*(x.split(ROWS) for x in (*everything, inputs.mask)), strict=True):
            error = clipped_error = (values - returns).square()
            if options.cliprange is not None:
                moved = (values - old).clamp(-options.cliprange, options.cliprange)
                clipped_error = (old + moved - returns).square()
            larger = torch.maximum(error, clipped_error)
            losses.append(torch.where(mask, larger, 0.0).sum() / count)
            of_tokens = torch.stack((values, returns, returns.square(), error)).detach()
            rows_of_metrics.append(torch.where(mask, of_tokens, 0.0).sum(1) / count)
        per_microbatch = torch.stack(rows_of_metrics)
        means = per_microbatch.mean(0) if bug == "mean" else per_microbatch.sum(0)
        names = ("values_mean", "returns_mean", "returns_sq_mean", "residual_sq_mean")
        loss = options.scale * 0.5 * torch.stack(losses).sum()
        return lossgate.Outputs(loss=loss, metrics=dict(zip(names, means, strict=True)))

    return kernel


value = value_of(None, "value")

# As in NeMo-RL #266. The metrics of micro-batches are divided by the count of the whole batch
# already, and are then averaged over micro-batches instead of added up, so they are too small by
# the number of micro-batches. The author would have to sum them.
microbatch_metrics_averaged_not_summed = value_of("mean", "microbatch_metrics_averaged_not_summed")

BUGS = {
    "beta_not_forwarded_default_used": ("single", "tp=2"),
    "sequence_sum_divided_by_tokens": ("cp=2", "dp=2,cp=2"),
    "microbatch_metrics_averaged_not_summed": ("single", "dp=2"),
}
RIGHT = {
    "fused_dpo": ("single", "tp=2"),
    "split_dpo": ("cp=2", "dp=2,cp=2"),
    "value": ("single", "dp=2"),
}
