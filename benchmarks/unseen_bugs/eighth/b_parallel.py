# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning losses whose ranks reduce, scale and slice for themselves."""

import torch
import torch.distributed as dist

import lossgate


class ColumnParallelCrossEntropy(torch.autograd.Function):
    """Head and cross entropy of tokens, of which each rank has rows of the vocabulary."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, mask, start, group, bug):
        states = hidden.float().masked_fill(~mask[:, None], 0.0)
        z = states @ weight.float().T
        largest = z.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exps = (z - largest[:, None]).exp()
        denominator = exps.sum(1)
        dist.all_reduce(denominator, group=group)
        own = (labels >= start) & (labels < start + len(weight))
        local = torch.where(own, labels - start, 0)
        target = torch.where(own, (z - largest[:, None]).gather(1, local[:, None])[:, 0], 0.0)
        dist.all_reduce(target, group=group)
        ctx.save_for_backward(states, weight, exps / denominator[:, None], own, local, mask)
        ctx.group, ctx.bug = group, bug
        return (denominator.log() - target).masked_fill(~mask, 0.0)

    @staticmethod
    def backward(ctx, upstream):
        states, weight, p, own, local, mask = ctx.saved_tensors
        dz = p.clone()
        dz.scatter_add_(1, local[:, None], -own[:, None].to(dz.dtype))
        dz = dz * upstream.masked_fill(~mask, 0.0)[:, None]
        grad_hidden = dz @ weight.float()
        # Each rank has the part of its own rows of the vocabulary in the gradient of the hidden
        # states, which are the same on all ranks. The parts are never added up.
        # To do: all-reduce the gradient of the hidden states in backward.
        if ctx.bug != "partial":
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden.to(weight.dtype), (dz.T @ states).to(weight.dtype), None, None, None, None, None


class ScaledGradient(torch.autograd.Function):
    """The loss as it is, with its gradient times a factor."""

    @staticmethod
    def forward(ctx, loss, factor):
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.factor, None


def losses_of(inputs, mesh, bug=None):
    return ColumnParallelCrossEntropy.apply(
        inputs.hidden, inputs.weight, inputs.labels, inputs.mask, inputs.vocab_start, mesh.get_group("tp"), bug
    )


def column_parallel_of(bug, name):
    @lossgate.candidate("nll", head="hidden", axes=("dp", "cp", "tp"), dtypes=("float32",), name=name)
    def kernel(inputs, options, mesh):
        return losses_of(inputs, mesh, bug).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


column_parallel = column_parallel_of(None, "column_parallel")
hidden_parts_never_added = column_parallel_of("partial", "hidden_parts_never_added")

AVERAGED = {"dp": "avg"}


def recipe_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "tp"),
        dtypes=("float32",),
        contract=lossgate.Contract(grads={"hidden": AVERAGED, "weight": AVERAGED}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        # torchtune: gradients are multiplied by the number of ranks, since FSDP divides them by
        # it. FSDP divides by the data-parallel ranks alone, and the number was that of all ranks,
        # those of tensor parallelism among them. To do: take the size of the dp dim.
        ranks = mesh.size() if bug == "world" else mesh.get_group("dp").size()
        running = losses_of(inputs, mesh).sum() / inputs.valid_tokens.clamp(min=1)
        return ScaledGradient.apply(running, ranks)

    return kernel


recipe = recipe_of(None, "recipe")
multiplied_by_all_ranks = recipe_of("world", "multiplied_by_all_ranks")


class ReduceLoss(torch.autograd.Function):
    """The mean loss over the ranks of sequence parallelism, from each rank's sum and count."""

    @staticmethod
    def forward(ctx, total, count, group, bug):
        count = count.clone()
        summed = total.detach().clone()
        dist.all_reduce(summed, group=group)
        dist.all_reduce(count, group=group)
        ctx.count, ctx.ranks, ctx.bug = count.clamp(min=1), group.size(), bug
        return summed / ctx.count

    @staticmethod
    def backward(ctx, upstream):
        # VeOmni: the gradient is multiplied by the number of ranks over which sequences are split,
        # as if something divided by it later. Nothing does. To do: leave the factor out.
        if ctx.bug == "ranks":
            upstream = upstream * ctx.ranks
        return upstream / ctx.count, None, None, None


def sequence_parallel_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("cp",),
        dtypes=("float32",),
        contract=lossgate.Contract(loss={"cp": "replicate"}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = inputs.logits.float().masked_fill(~inputs.mask[:, None], 0.0)
        losses = torch.nn.functional.cross_entropy(logits, inputs.labels, reduction="none")
        total = losses.masked_fill(~inputs.mask, 0.0).sum()
        return ReduceLoss.apply(total, inputs.mask.sum(), mesh.get_group("cp"), bug)

    return kernel


sequence_parallel = sequence_parallel_of(None, "sequence_parallel")
gradient_times_ranks_of_cp = sequence_parallel_of("ranks", "gradient_times_ranks_of_cp")


def zigzag_of(bug, name):
    @lossgate.candidate("nll", head="logits", tokens="rows", axes=("dp", "cp"), dtypes=("float32",), name=name)
    def kernel(inputs, options, mesh):
        group = mesh.get_group("cp")
        pieces = 2 * group.size() if group.size() > 1 else 1
        mine = (group.rank(), pieces - 1 - group.rank()) if pieces > 1 else (0,)
        lengths, padded = inputs.cu_seqlens.diff().tolist(), inputs.cu_seqlens_padded.diff().tolist()
        total = inputs.logits[:0].float().sum()
        at = 0
        for i, (length, whole) in enumerate(zip(lengths, padded, strict=True)):
            labels = torch.zeros(whole, dtype=torch.long)
            trained = torch.zeros(whole, dtype=torch.bool)
            labels[: max(length - 1, 0)] = inputs.input_ids[i, 1:length]
            trained[: max(length - 1, 0)] = inputs.mask[i, 1:length]
            # The response starts at the first trained token; what is not trained in it are holes.
            start = int(trained.nonzero()[0]) if bool(trained.any()) else whole
            holes = ~trained & (torch.arange(whole) >= start)
            size = whole // pieces
            for piece in mine:
                first, last = piece * size, (piece + 1) * size
                n = max(last - max(first, start), 0)  # tokens of the response in this piece
                mask = torch.zeros(size, dtype=torch.bool)
                # slime: the last n tokens of a piece belong to the response, and [-n:] is all of
                # them where n is 0, so that pieces of prompts alone are trained.
                # To do: start at size - n.
                mask[(-n if bug == "negative" else size - n) :] = True
                mask &= ~holes[first:last]
                logits = inputs.logits[at : at + size].float().masked_fill(~mask[:, None], 0.0)
                losses = torch.nn.functional.cross_entropy(logits, labels[first:last], reduction="none")
                total = total + losses.masked_fill(~mask, 0.0).sum()
                at += size
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


zigzag = zigzag_of(None, "zigzag")
slice_from_minus_zero = zigzag_of("negative", "slice_from_minus_zero")


class GatherSequence(torch.autograd.Function):
    """The tensors of all ranks along the dim that is annotated as split."""

    @staticmethod
    def forward(ctx, local, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, upstream):
        return upstream.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


def annotated_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("cp",),
        dtypes=("float32",),
        contract=lossgate.Contract(loss={"cp": "replicate"}, grads={"weight": {"cp": "replicate"}}),
        name=name,
    )
    def kernel(inputs, options, mesh):
        group = mesh.get_group("cp")
        tokens, width = inputs.hidden.shape
        heads = 2 if width % 2 == 0 else 1
        states = inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0)
        states = states.reshape(1, tokens, heads, width // heads)
        # torchtitan: the plan says Shard(2), as for [batch, heads, sequence, dim], of tensors that
        # are [batch, sequence, heads, dim]. What ranks have is then joined along the heads, and
        # rows are in another order than their labels. To do: annotate the dim of the sequence.
        split = 2 if bug == "heads" else 1
        states = GatherSequence.apply(states, split, group).reshape(-1, width)
        labels = GatherSequence.apply(inputs.labels, 0, group)
        mask = GatherSequence.apply(inputs.mask.to(torch.uint8), 0, group).bool()
        losses = torch.nn.functional.cross_entropy(states @ inputs.weight.T, labels, reduction="none")
        return losses.masked_fill(~mask, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


annotated = annotated_of(None, "annotated")
joined_along_the_heads = annotated_of("heads", "joined_along_the_heads")

BUGS = {
    "hidden_parts_never_added": ("tp=2", "dp=2,tp=2"),
    "gradient_times_ranks_of_cp": ("cp=2",),
    "multiplied_by_all_ranks": ("tp=2", "dp=2,tp=2"),
    "slice_from_minus_zero": ("cp=2", "dp=2,cp=2"),
    "joined_along_the_heads": ("cp=2",),
}
RIGHT = {
    "column_parallel": ("tp=2", "dp=2,tp=2"),
    "sequence_parallel": ("cp=2",),
    "recipe": ("tp=2", "dp=2,tp=2"),
    "zigzag": ("cp=2", "dp=2,cp=2"),
    "annotated": ("cp=2",),
}
