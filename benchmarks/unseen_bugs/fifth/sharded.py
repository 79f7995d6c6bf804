# SPDX-License-Identifier: Apache-2.0
"""SFT kernels over ranks that split the vocabulary or the tokens."""

import torch
import torch.distributed as dist

import lossgate

TILE = 4  # rows of the lm-head in a tile


class VocabParallelLinearCrossEntropy(torch.autograd.Function):
    """Column-parallel lm-head and cross-entropy, a tile of this rank's rows at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, mask, denominator, temperature, start, end, tiles, group, bug):
        h = hidden.masked_fill(~mask[:, None], 0.0)
        rows = end - start
        local = labels - start
        outside = (local < 0) | (local >= rows)
        local = local.masked_fill(outside, 0)
        top = h.new_full((h.shape[0],), -torch.inf)
        total = h.new_zeros(h.shape[0])
        target = h.new_zeros(h.shape[0])
        for first in range(0, rows, TILE):
            last = min(first + TILE, rows)
            z = h @ weight[first:last].T / temperature
            new = torch.maximum(top, z.amax(dim=1))
            total = total * (top - new).exp() + (z - new[:, None]).exp().sum(dim=1)
            top = new
            hit = (local >= first) & (local < last) & ~outside
            column = (local - first).clamp(0, last - first - 1)
            target += z.gather(1, column[:, None]).squeeze(1).masked_fill(~hit, 0.0)
        whole = top.clone()
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack([total * (top - whole).exp(), target])
        dist.all_reduce(sums, group=group)
        lse = whole + sums[0].log()
        ctx.save_for_backward(h, weight, local, outside, lse, mask, denominator)
        ctx.rest = temperature, rows, tiles, group, bug
        return (lse - sums[1]).masked_fill(~mask, 0.0).sum() / denominator

    @staticmethod
    def backward(ctx, upstream):
        h, weight, local, outside, lse, mask, denominator = ctx.saved_tensors
        temperature, rows, tiles, group, bug = ctx.rest
        grad_hidden = torch.zeros_like(h)
        grad_weight = torch.zeros_like(weight)
        scale = (mask * (upstream / (denominator * temperature)))[:, None]
        for tile in range(tiles):
            first, last = min(tile * TILE, rows), min((tile + 1) * TILE, rows)
            if last > first:
                z = h @ weight[first:last].T / temperature
                d = (z - lse[:, None]).exp()
                hit = (local >= first) & (local < last)
                if bug != "one_hot_on_every_shard":
                    hit = hit & ~outside
                column = (local - first).clamp(0, last - first - 1)
                d.scatter_add_(1, column[:, None], -hit[:, None].to(d.dtype))
                d *= scale
                grad_weight[first:last] = d.T @ h
                grad_hidden += d @ weight[first:last]
            if bug == "tiles_reduced_again":
                dist.all_reduce(grad_hidden, group=group)
        if bug != "tiles_reduced_again":
            dist.all_reduce(grad_hidden, group=group)
        return grad_hidden, grad_weight, *(None,) * 9


def vocab_parallel_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY, "vocab_split": lossgate.ANY},
        tiles={"vocab": TILE},
        name=name,
    )
    def kernel(inputs, options, mesh):
        labels = inputs.labels
        if bug == "labels_rolled_on_the_shard":
            labels = inputs.input_ids.roll(-1)
        ranks = mesh["tp"].size()
        widest = -(-inputs.vocab_size // ranks)
        return VocabParallelLinearCrossEntropy.apply(
            inputs.hidden,
            inputs.weight,
            labels,
            inputs.mask,
            inputs.valid_tokens.clamp(min=1),
            options.temperature,
            inputs.vocab_start,
            inputs.vocab_end,
            -(-widest // TILE),
            mesh.get_group("tp"),
            bug,
        )

    return kernel


vocab_parallel = vocab_parallel_of(None, "vocab_parallel")

# Labels of other shards are set to row 0 so that they can be gathered. Backward forgets that they
# are not here, and subtracts 1 at row 0 of every shard that does not own the label.
one_hot_on_every_shard = vocab_parallel_of("one_hot_on_every_shard", "one_hot_on_every_shard")

# The running gradient of the hidden states is all-reduced over tp after every tile, not once after
# the last: what earlier tiles gave is summed over the ranks again and again.
tiles_reduced_again = vocab_parallel_of("tiles_reduced_again", "tiles_reduced_again")

# Labels are made by rolling this rank's input ids by one: where cp cuts the sequence, the last
# token of a piece gets the first token of the rank's next piece as its label.
labels_rolled_on_the_shard = vocab_parallel_of("labels_rolled_on_the_shard", "labels_rolled_on_the_shard")


class VocabParallelSmoothing(torch.autograd.Function):
    """Label-smoothed cross-entropy of logits whose columns are split, with Megatron's structure."""

    @staticmethod
    def forward(ctx, logits, labels, mask, denominator, smoothing, start, end, vocab_size, group, bug):
        columns = end - start
        z = logits[:, :columns].masked_fill(~mask[:, None], 0.0)
        top = z.amax(dim=1) if columns else z.new_full((z.shape[0],), -torch.inf)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z = z - top[:, None]
        local = labels - start
        outside = (local < 0) | (local >= columns)
        local = local.masked_fill(outside, 0)
        target = z.new_zeros(z.shape[0])
        if columns:
            target = z.gather(1, local[:, None]).squeeze(1).masked_fill(outside, 0.0)
        exp = z.exp()
        sums = torch.stack([exp.sum(dim=1), target, z.sum(dim=1)])
        dist.all_reduce(sums, group=group)
        total, target, everything = sums
        lse = total.log()
        losses = lse - (1 - smoothing) * target - smoothing * everything / vocab_size
        ctx.save_for_backward(exp / total[:, None], local, outside, mask, denominator)
        ctx.rest = smoothing, columns, vocab_size, logits.shape[1], bug
        return losses.masked_fill(~mask, 0.0).sum() / denominator

    @staticmethod
    def backward(ctx, upstream):
        p, local, outside, mask, denominator = ctx.saved_tensors
        smoothing, columns, vocab_size, width, bug = ctx.rest
        d = p.new_zeros(p.shape[0], width)
        if columns:
            if bug == "smoothing_by_the_partition":
                vocab_size = p.shape[1]
            g = p - smoothing / vocab_size
            g.scatter_add_(1, local[:, None], (smoothing - 1) * (~outside)[:, None].to(p.dtype))
            d[:, :columns] = g * (upstream / denominator)
        return d.masked_fill(~mask[:, None], 0.0), *(None,) * 9


def smoothed_of(bug, name):
    @lossgate.candidate(
        "label_smoothing",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"smoothing": lossgate.ANY, "vocab_split": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        return VocabParallelSmoothing.apply(
            inputs.logits,
            inputs.labels,
            inputs.mask,
            inputs.valid_tokens.clamp(min=1),
            options.smoothing,
            inputs.vocab_start,
            inputs.vocab_end,
            inputs.vocab_size,
            mesh.get_group("tp"),
            bug,
        )

    return kernel


smoothed = smoothed_of(None, "smoothed")

# Backward spreads the smoothing over the columns of this rank, smoothing / columns, where forward
# takes the mean over the whole vocabulary.
smoothing_by_the_partition = smoothed_of("smoothing_by_the_partition", "smoothing_by_the_partition")


class SumOverGroup(torch.autograd.Function):
    """The sum over ranks, for a loss that every rank then has as a whole."""

    @staticmethod
    def forward(ctx, x, group, bug):
        ctx.group, ctx.bug = group, bug
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, upstream):
        if ctx.bug == "loss_reduced_in_backward":
            upstream = upstream.clone()
            dist.all_reduce(upstream, group=ctx.group)
        return upstream, None, None


def gathered_loss_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logprobs",
        axes=("dp", "cp"),
        dtypes=("float32",),
        contract=lossgate.Contract(loss={"cp": "replicate"}),
        supports={"reduction": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        total = -inputs.logprobs.masked_fill(~inputs.mask, 0.0).sum()
        if options.reduction == "mean":
            total = total / inputs.valid_tokens.clamp(min=1)
        return SumOverGroup.apply(total, mesh.get_group("cp"), bug)

    return kernel


gathered_loss = gathered_loss_of(None, "gathered_loss")

# The all-reduce of the loss over cp all-reduces the upstream gradient in backward, too, although
# every cp rank already starts backward from the whole loss: gradients are cp times too large.
loss_reduced_in_backward = gathered_loss_of("loss_reduced_in_backward", "loss_reduced_in_backward")

BUGS = {
    "one_hot_on_every_shard": ("tp=2",),
    "tiles_reduced_again": ("tp=2",),
    "labels_rolled_on_the_shard": ("cp=2",),
    "smoothing_by_the_partition": ("tp=2",),
    "loss_reduced_in_backward": ("cp=2", "dp=2,cp=2"),
}
RIGHT = ("vocab_parallel", "smoothed", "gathered_loss")
