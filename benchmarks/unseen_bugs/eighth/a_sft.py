# SPDX-License-Identifier: Apache-2.0
"""Cross entropy: parallel over the vocabulary with a loss of each token, in micro-batches, over
shards of a context, and fused with the lm-head, with gradients that forward computes.
"""

import torch
import torch.distributed as dist

import lossgate

ANY = lossgate.ANY
MAX = dist.ReduceOp.MAX


class ParallelCrossEntropy(torch.autograd.Function):
    """The loss of each row, with the vocabulary split over ``group``."""

    @staticmethod
    def forward(ctx, logits, labels, start, group, bug):
        logits = logits.float()
        largest = logits.amax(-1) if logits.shape[1] else logits.new_full(labels.shape, -torch.inf)
        dist.all_reduce(largest, op=MAX, group=group)
        shifted = logits - largest[:, None]
        exps = shifted.exp()
        normaliser = exps.sum(-1)
        own = (labels >= start) & (labels < start + logits.shape[1])
        column = torch.where(own, labels - start, 0)
        target = torch.where(own, shifted.gather(1, column[:, None])[:, 0], 0.0)
        sums = torch.stack([normaliser, target])
        dist.all_reduce(sums, group=group)
        normaliser, target = sums
        ctx.save_for_backward(exps / normaliser[:, None], own, column)
        ctx.bug = bug
        return normaliser.log() - target

    @staticmethod
    def backward(ctx, grad_output):
        softmax, own, column = ctx.saved_tensors
        grad = softmax.scatter_add(1, column[:, None], -own[:, None].to(softmax.dtype))
        if ctx.bug == "unreduced_by_rows":
            grad = grad / max(len(own), 1)
        return grad * grad_output[:, None], None, None, None, None


def engine_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="logits",
        axes=("dp", "cp", "tp"),
        dtypes=("float32",),
        supports={"temperature": ANY},
        differentiable=("logprobs",),
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0) / options.temperature
        losses = ParallelCrossEntropy.apply(logits, inputs.labels, inputs.vocab_start, mesh.get_group("tp"), bug)
        return lossgate.Outputs(logprobs=-losses)

    return kernel


engine = engine_of(None, "engine")

# The gradient of the logits is divided by the number of rows, as for a mean, although the function
# returns the loss of each row and the caller reduces it. The author would have to divide only
# where the loss itself is reduced. (Transformer Engine)
unreduced_by_rows = engine_of("unreduced_by_rows", "unreduced_by_rows")

MICRO_BATCH = 2  # sequences


class AccumulatedLoss(torch.autograd.Function):
    """Forward and backward of one micro-batch after the other, with gradients kept from forward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, mask, sequence, sequences, count, bug):
        head = weight.detach().requires_grad_()
        head.grad = torch.zeros_like(head)
        total, hidden_grad = torch.zeros(()), torch.zeros_like(hidden)
        for first in range(0, sequences, MICRO_BATCH):
            if bug == "zeroed_each_micro_batch":
                head.grad = torch.zeros_like(head)
            rows = (mask & (sequence >= first) & (sequence < first + MICRO_BATCH)).nonzero()[:, 0]
            with torch.enable_grad():
                part = hidden[rows].detach().requires_grad_()
                logprobs = (part @ head.T).float().log_softmax(-1)
                loss = -logprobs.gather(1, labels[rows, None]).sum() / count
                loss.backward()
            total += loss.detach()
            hidden_grad[rows] = part.grad
        ctx.save_for_backward(hidden_grad, head.grad)
        return total

    @staticmethod
    def backward(ctx, upstream):
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * upstream, head_grad * upstream, None, None, None, None, None, None


def titan_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        precision=lossgate.Precision(grads_in_forward=True),
        name=name,
    )
    def kernel(inputs, options, mesh):
        count, sequences = inputs.valid_tokens.clamp(min=1), inputs.cu_seqlens.numel() - 1
        return AccumulatedLoss.apply(
            inputs.hidden, inputs.weight, inputs.labels, inputs.mask, inputs.sequence, sequences, count, bug
        )

    return kernel


titan = titan_of(None, "titan")

# The gradients of the lm-head are set to zero before each micro-batch in place of each step, so
# those of the last micro-batch alone remain. The author would have to move zero_grad out of the
# loop over micro-batches. (torchtitan)
zeroed_each_micro_batch = titan_of("zeroed_each_micro_batch", "zeroed_each_micro_batch")


def labels_of_pieces(inputs, cp):
    """Shifts the ids within each contiguous piece of this rank; the last of a piece is ignored."""
    targets = torch.full_like(inputs.labels, -100)
    lengths = (inputs.cu_seqlens_padded.diff() // cp).tolist()
    start = 0
    for length in lengths:
        pieces = [length] if cp == 1 else [length // 2, length - length // 2]
        for piece in pieces:
            targets[start : start + piece - 1] = inputs.input_ids[start + 1 : start + piece]
            start += piece
    return targets


def context_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"reduction": ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        labels = inputs.labels
        if bug == "shifted_after_the_split":
            labels = labels_of_pieces(inputs, mesh.get_group("cp").size())
        targets = labels.masked_fill(~inputs.mask, -100)
        total = torch.nn.functional.cross_entropy(inputs.logits.float(), targets, reduction="sum")
        return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)

    return kernel


context = context_of(None, "context")

# Each rank shifts the ids of its own shard, so the last token of a contiguous piece has no next
# token and is ignored, although the next piece starts with its label. The author would have to
# shift the whole sequences before they are split, or fetch the first id of the next piece.
# (torchtitan, TRL)
shifted_after_the_split = context_of("shifted_after_the_split", "shifted_after_the_split")

CHUNK = 8


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Cross entropy fused with the lm-head. Chunks of logits become their gradients in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, n_non_ignore, bug):
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        total = torch.zeros(())
        for rows in torch.arange(len(labels)).split(CHUNK):
            part, targets = hidden[rows], labels[rows]
            logits = part @ weight.T
            logits = logits if bias is None else logits + bias
            logprobs = logits.float().log_softmax(-1)
            kept, safe = targets != -100, targets.clamp(min=0)[:, None]
            total -= torch.where(kept, logprobs.gather(1, safe)[:, 0], 0.0).sum()
            dlogits = logprobs.exp().scatter_add(1, safe, torch.full_like(logprobs[:, :1], -1.0))
            dlogits = torch.where(kept[:, None], dlogits, 0.0) / n_non_ignore
            grad_hidden[rows] = dlogits @ weight
            grad_weight += dlogits.T @ part
            if grad_bias is not None:
                grad_bias += dlogits.sum(0)
        ctx.grads, ctx.bug = (grad_hidden, grad_weight, grad_bias), bug
        return total / n_non_ignore

    @staticmethod
    def backward(ctx, grad_output):
        grads = [None if grad is None else grad * grad_output for grad in ctx.grads]
        if ctx.bug == "scaled_twice":
            grads = [None if grad is None else grad * grad_output for grad in grads]
        return *grads, None, None, None


def fused_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"bias": ANY},
        precision=lossgate.Precision(grads_in_forward=True),
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        hidden = torch.where(inputs.mask[:, None], inputs.hidden, 0.0)
        labels = inputs.labels.masked_fill(~inputs.mask, -100)
        n_non_ignore = inputs.valid_tokens
        if bug != "nothing_to_train":
            n_non_ignore = n_non_ignore.clamp(min=1)
        return FusedLinearCrossEntropy.apply(hidden, inputs.weight, inputs.bias, labels, n_non_ignore, bug)

    return kernel


fused = fused_of(None, "fused")

# The loss and its gradients are divided by the number of labels that are not ignored, which is 0
# where all of them are: 0 / 0 is NaN. The author would have to guard that division, so that
# nothing to train is a loss of 0. (Liger)
nothing_to_train = fused_of("nothing_to_train", "nothing_to_train")

# The upstream gradient is multiplied into the gradients that forward kept, and then once more into
# what backward returns, so they scale with its square. The author would have to drop one of the
# two products.
scaled_twice = fused_of("scaled_twice", "scaled_twice")

BUGS = {
    "unreduced_by_rows": ("single", "tp=2"),
    "zeroed_each_micro_batch": ("single", "dp=2"),
    "shifted_after_the_split": ("cp=2", "dp=2,cp=2"),
    "nothing_to_train": ("single", "dp=2"),
    "scaled_twice": ("single", "cp=2"),
}
RIGHT = {
    "engine": ("single", "tp=2"),
    "titan": ("single", "dp=2"),
    "context": ("cp=2", "dp=2,cp=2"),
    "fused": ("single", "dp=2", "cp=2"),
}
