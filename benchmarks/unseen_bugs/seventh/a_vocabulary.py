# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel losses, with the collectives of tensor parallelism, and their bugs."""

import torch
import torch.distributed as dist

import lossgate


class MegatronCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits ``[tokens, own columns]``, by three all-reduces."""

    @staticmethod
    def forward(ctx, logits, labels, start, group, bug):
        largest = logits.amax(dim=1)
        if bug != "local max":
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        local = labels - start
        elsewhere = (local < 0) | (local >= logits.shape[1])
        local = local.masked_fill(elsewhere, 0)
        predicted = shifted.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        dist.all_reduce(predicted, group=group)
        exponentials = shifted.exp()
        total = exponentials.sum(dim=1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exponentials / total[:, None], local, elsewhere)
        return total.log() - predicted

    @staticmethod
    def backward(ctx, upstream):
        softmax, local, elsewhere = ctx.saved_tensors
        grad = softmax.clone()
        grad[torch.arange(len(grad)), local] -= (~elsewhere).to(grad.dtype)
        return grad * upstream[:, None], None, None, None, None


def megatron_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0) / options.temperature
        losses = MegatronCrossEntropy.apply(logits, inputs.labels, inputs.vocab_start, mesh.get_group("tp"), bug)
        return losses.masked_fill(~inputs.mask, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


megatron = megatron_of(None, "megatron")

# Every rank shifts its logits by its own maximum before the exponentials, and these sums of
# different shifts are then added up over the tensor-parallel ranks. The author must all-reduce the
# maximum first.
local_maximum_shifts_each_shard = megatron_of("local max", "local_maximum_shifts_each_shard")


class CopyToTp(torch.autograd.Function):
    """The identity, whose gradient is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        upstream = upstream.clone()
        dist.all_reduce(upstream, group=ctx.group)
        return upstream, None


class GatherColumns(torch.autograd.Function):
    """Gathers equal shards of the last dimension; backward keeps the rank's own columns."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.columns = group, x.shape[-1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, upstream):
        first = ctx.group.rank() * ctx.columns
        return upstream[..., first : first + ctx.columns].contiguous(), None


class GatheredCrossEntropy(torch.autograd.Function):
    """Cross entropy whose sum of exponentials is all-reduced over a group, unless that is None."""

    @staticmethod
    def forward(ctx, logits, labels, group):
        largest = logits.amax(dim=1, keepdim=True)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        z = logits - largest
        total = z.exp().sum(dim=1)
        if group is not None:
            dist.all_reduce(total, group=group)
        ctx.save_for_backward(z, labels, total)
        return total.log() - z.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        z, labels, total = ctx.saved_tensors
        grad = z.exp() / total[:, None]
        grad.scatter_add_(1, labels[:, None], grad.new_full((len(grad), 1), -1.0))
        return grad * upstream[:, None], None, None


def gathered_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "tp"),
        dtypes=("float32",),
        supports={"vocab_split": "even", "bias": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        group = mesh.get_group("tp")
        hidden = CopyToTp.apply(inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0), group)
        logits = hidden @ inputs.weight.t()
        if inputs.bias is not None:
            logits = logits + inputs.bias
        logits = GatherColumns.apply(logits, group)
        losses = GatheredCrossEntropy.apply(logits, inputs.labels, group if bug == "parallel" else None)
        return losses.masked_fill(~inputs.mask, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


gathered = gathered_of(None, "gathered")

# The lm-head has already gathered the logits, but the cross entropy still adds up the sums of
# exponentials over the ranks, so the normaliser is tp times too large. The author must call the
# cross entropy without a group, or not gather the logits.
gathered_exponentials_summed_again = gathered_of("parallel", "gathered_exponentials_summed_again")


class AllToAll(torch.autograd.Function):
    """Exchanges ``[ranks, ...]``: part i of rank j becomes part j of rank i."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, upstream):
        grad = torch.empty_like(upstream)
        dist.all_to_all_single(grad, upstream.contiguous(), group=ctx.group)
        return grad, None


class GatherTokens(torch.autograd.Function):
    """Gathers equal shards of tokens, for every rank; backward keeps the own ones."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.tokens = group, len(x)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, upstream):
        first = ctx.group.rank() * ctx.tokens
        return upstream[first : first + ctx.tokens], None


def exchanged_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY, "vocab_split": "even"},
        differentiable=("logprobs", "token_entropy"),
        name=name,
    )
    def kernel(inputs, options, mesh):
        group = mesh.get_group("tp")
        ranks, (tokens, columns) = group.size(), inputs.logits.shape
        own = -(-tokens // ranks)
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0)
        logits = torch.nn.functional.pad(logits, (0, 0, 0, own * ranks - tokens))
        parts = AllToAll.apply(logits.view(ranks, own, columns), group)
        if bug == "no transpose":
            rows = parts.reshape(own, ranks * columns)
        else:
            rows = parts.transpose(0, 1).reshape(own, ranks * columns)
        labels = torch.nn.functional.pad(inputs.labels, (0, own * ranks - tokens))
        labels = labels[group.rank() * own : (group.rank() + 1) * own]
        everything = torch.log_softmax(rows / options.temperature, dim=1)
        logprobs = everything.gather(1, labels[:, None])[:, 0]
        entropy = -(everything.exp() * everything).sum(dim=1)
        both = GatherTokens.apply(torch.stack([logprobs, entropy], dim=1), group)[:tokens]
        return lossgate.Outputs(logprobs=both[:, 0], token_entropy=both[:, 1])

    return kernel


exchanged = exchanged_of(None, "exchanged")

# An all-to-all trades columns of the vocabulary for tokens and returns [ranks, tokens, columns];
# the kernel reshapes that to rows without the transpose, so rows mix columns of several tokens. The
# author must transpose ranks and tokens before the reshape.
exchange_reshaped_without_transpose = exchanged_of("no transpose", "exchange_reshaped_without_transpose")


class ShardLogprobs(torch.autograd.Function):
    """Log-probabilities of labels from a shard of the logits, with a saved log-sum-exp."""

    @staticmethod
    def forward(ctx, logits, labels, start, end, group, bug):
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        z = logits - largest[:, None]
        owned = (labels >= start) & (labels <= end if bug == "closed" else labels < end)
        local = (labels - start).clamp(0, end - start - 1)
        sums = torch.stack([z.exp().sum(dim=1), torch.where(owned, z.gather(1, local[:, None])[:, 0], 0.0)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(z, sums[0], owned, local)
        return sums[1] - sums[0].log()

    @staticmethod
    def backward(ctx, upstream):
        z, total, owned, local = ctx.saved_tensors
        grad = -upstream[:, None] * (z.exp() / total[:, None])
        grad.scatter_add_(1, local[:, None], torch.where(owned, upstream, 0.0)[:, None])
        return grad, None, None, None, None, None


def pairs_of(bug, name):
    @lossgate.candidate(
        "dpo",
        head="logits",
        axes=("dp", "tp"),
        dtypes=("float32",),
        supports={"reference_policy_kl_penalty": lossgate.ANY, "temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0) / options.temperature
        start, end = inputs.vocab_start, inputs.vocab_end
        logprobs = ShardLogprobs.apply(logits, inputs.labels, start, end, mesh.get_group("tp"), bug)
        gains = torch.where(inputs.mask, logprobs - inputs.reference_logprobs, 0.0)
        rewards = gains.new_zeros(len(inputs.sample_mask)).index_add(0, inputs.sequence, gains)
        margins = options.reference_policy_kl_penalty * (rewards[0::2] - rewards[1::2])
        losses = torch.where(inputs.sample_mask[0::2], torch.nn.functional.softplus(-margins), 0.0)
        return losses.sum() / (inputs.valid_sequences / 2).clamp(min=0.5)

    return kernel


pairs = pairs_of(None, "pairs")

# A rank also takes the label that is one past its last column for its own, so this label has two
# owners, and the first of them adds its last logit. The author must compare with < in place of <=
# at the end of the shard.
label_past_shard_owned_twice = pairs_of("closed", "label_past_shard_owned_twice")

BUGS = {
    "local_maximum_shifts_each_shard": ("tp=2", "dp=2,tp=2"),
    "gathered_exponentials_summed_again": ("tp=2",),
    "exchange_reshaped_without_transpose": ("tp=2",),
    "label_past_shard_owned_twice": ("tp=3",),
}
RIGHT = {
    "megatron": ("tp=2", "dp=2,tp=2"),
    "gathered": ("tp=2",),
    "exchanged": ("tp=2",),
    "pairs": ("tp=3",),
}
