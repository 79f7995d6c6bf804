# SPDX-License-Identifier: Apache-2.0
"""Losses from hidden states, in chunks of tokens or tiles of the vocabulary, and bugs of them."""

import torch

import lossgate

TOKENS = 8
ROWS = 4


class ChunkedNll(torch.autograd.Function):
    """Negative log-likelihood over N, which recomputes the logits of chunks in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, mask, count, bug):
        total = hidden.new_zeros(())
        for rows in torch.arange(len(hidden)).split(TOKENS):
            logits = hidden[rows] @ weight.t()
            if bias is not None:
                logits = logits + bias
            lse = torch.logsumexp(logits, dim=1)
            picked = logits.gather(1, labels[rows, None])[:, 0]
            total += torch.where(mask[rows], lse - picked, 0.0).sum()
        ctx.save_for_backward(hidden, weight, bias, labels, mask, count)
        ctx.bug = bug
        return total / count

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, bias, labels, mask, count = ctx.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        for rows in torch.arange(len(hidden)).split(TOKENS):
            logits = hidden[rows] @ weight.t()
            if bias is not None:
                logits = logits + bias
            d = torch.softmax(logits, dim=1)
            d.scatter_add_(1, labels[rows, None], -torch.ones_like(d[:, :1]))
            d = torch.where(mask[rows, None], d, 0.0) * upstream
            d_hidden[rows] = d @ weight / count
            d_weight += d.t() @ hidden[rows]
            if d_bias is not None:
                d_bias += d.sum(0)
            if ctx.bug == "scale in loop":
                d_weight /= count
                if d_bias is not None:
                    d_bias /= count
        if ctx.bug != "scale in loop":
            d_weight /= count
            if d_bias is not None:
                d_bias /= count
        return d_hidden, d_weight, d_bias, None, None, None, None


def chunked_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"bias": lossgate.ANY},
        tiles={"token": TOKENS},
        name=name,
    )
    def kernel(inputs, options, mesh):
        count = inputs.valid_tokens.clamp(min=1).to(torch.float32)
        return ChunkedNll.apply(inputs.hidden, inputs.weight, inputs.bias, inputs.labels, inputs.mask, count, bug)

    return kernel


chunked = chunked_of(None, "chunked")

# The running gradients of weight and bias are scaled after every chunk, so those of earlier chunks
# are scaled again with each later one; the loss and the gradient of the hidden states are right.
# The author must move the scaling behind the loop.
weight_gradient_scaled_every_chunk = chunked_of("scale in loop", "weight_gradient_scaled_every_chunk")


class FilteredNll(torch.autograd.Function):
    """Cut cross entropy: an online softmax over tiles, and a backward tile by tile."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, mask, bug):
        lse = hidden.new_full((len(hidden),), float("-inf"))
        picked = hidden.new_zeros(len(hidden))
        for start in range(0, len(weight), ROWS):
            tile = hidden @ weight[start : start + ROWS].t()
            lse = torch.logaddexp(lse, torch.logsumexp(tile, dim=1))
            local = labels - start
            here = (local >= 0) & (local < tile.shape[1])
            picked += torch.where(here, tile.gather(1, local.clamp(0, tile.shape[1] - 1)[:, None])[:, 0], 0.0)
        ctx.save_for_backward(hidden, weight, labels, mask, lse)
        ctx.bug = bug
        return torch.where(mask, lse - picked, 0.0)

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, labels, mask, lse = ctx.saved_tensors
        upstream = torch.where(mask, upstream, 0.0)
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for first in range(0, len(hidden), TOKENS):
            tokens = slice(first, first + TOKENS)
            for start in range(0, len(weight), ROWS):
                rows = slice(start, start + ROWS)
                d = torch.exp(hidden[tokens] @ weight[rows].t() - lse[tokens, None])
                ids = torch.arange(start, start + d.shape[1])
                d = d - (labels[tokens, None] == ids).to(d.dtype)
                d = torch.where(mask[tokens, None], d, 0.0)
                if ctx.bug == "filter" and d.abs().max() < 2**-12:
                    continue
                d = d * upstream[tokens, None]
                d_hidden[tokens] += d @ weight[rows]
                d_weight[rows] += d.t() @ hidden[tokens]
        return d_hidden, d_weight, None, None, None


def cut_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"reduction": lossgate.ANY},
        tiles={"token": TOKENS, "vocab": ROWS},
        name=name,
    )
    def kernel(inputs, options, mesh):
        losses = FilteredNll.apply(inputs.hidden, inputs.weight, inputs.labels, inputs.mask, bug)
        total = losses.sum()
        return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)

    return kernel


cut = cut_of(None, "cut")

# Backward skips tiles whose softmax entries are all below 2^-12, as cut cross entropy does to save
# time, and so loses the gradient of rare tokens, which adds up over many tokens. The author must
# not filter, or filter at a threshold far below the resolution of the gradients.
small_softmax_tiles_skipped = cut_of("filter", "small_softmax_tiles_skipped")


class LinearLogprobs(torch.autograd.Function):
    """Log-probabilities of labels from hidden states ``[batch, tokens, width]``."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, mask, temperature, bug):
        wanted = ctx.needs_input_grad[0]
        rows = hidden.flatten(0, 1).masked_fill(~mask[:, None], 0.0)
        if bug == "flag after flatten":
            wanted = rows.requires_grad
        logprobs = torch.log_softmax(rows @ weight.t() / temperature, dim=1)
        ctx.save_for_backward(rows, weight, labels, mask, logprobs)
        ctx.wanted, ctx.shape, ctx.temperature = wanted, hidden.shape, temperature
        return logprobs.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        rows, weight, labels, mask, logprobs = ctx.saved_tensors
        upstream = upstream.masked_fill(~mask, 0.0)
        d = -logprobs.exp() * upstream[:, None]
        d.scatter_add_(1, labels[:, None], upstream[:, None])
        d /= ctx.temperature
        d_hidden = (d @ weight).view(ctx.shape) if ctx.wanted else None
        d_weight = d.t() @ rows if ctx.needs_input_grad[1] else None
        return d_hidden, d_weight, None, None, None, None


def linear_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        batch, labels, mask = inputs.hidden.unsqueeze(0), inputs.labels, inputs.mask
        logprobs = LinearLogprobs.apply(batch, inputs.weight, labels, mask, options.temperature, bug)
        return lossgate.Outputs(logprobs=logprobs)

    return kernel


linear = linear_of(None, "linear")

# The kernel flattens and cleans the hidden states inside forward, where gradients are off, and then
# asks the flat copy whether it needs a gradient: it never does, so backward returns None for them.
# The author must ask ctx.needs_input_grad, or flatten outside of the function.
hidden_gradient_lost_by_flatten = linear_of("flag after flatten", "hidden_gradient_lost_by_flatten")


def columns_of(matrix, first, last, bug):
    """Loads columns of a ``[width, vocab]`` matrix from memory, as by a pointer."""
    width, vocab = matrix.shape
    down, right = (vocab, 1) if bug == "row-major" else matrix.stride()
    return matrix.as_strided((width, last - first), (down, right), matrix.storage_offset() + first * right)


class PointerSoftcapNll(torch.autograd.Function):
    """Negative log-likelihoods of soft-capped logits, for a weight ``[width, vocab]``."""

    @staticmethod
    def capped(hidden, matrix, softcap, bug):
        vocab = matrix.shape[1]
        for first in range(0, vocab, ROWS):
            last = min(first + ROWS, vocab)
            block = columns_of(matrix, first, last, bug)
            yield first, last, block, torch.tanh(hidden @ block / softcap)

    @staticmethod
    def forward(ctx, hidden, matrix, labels, softcap, bug):
        logits = hidden.new_empty(len(hidden), matrix.shape[1])
        for first, last, _, tanh in PointerSoftcapNll.capped(hidden, matrix, softcap, bug):
            logits[:, first:last] = softcap * tanh
        logprobs = torch.log_softmax(logits, dim=1)
        ctx.save_for_backward(hidden, matrix, labels, logprobs)
        ctx.softcap, ctx.bug = softcap, bug
        return -logprobs.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        hidden, matrix, labels, logprobs = ctx.saved_tensors
        d_hidden, d_matrix = torch.zeros_like(hidden), torch.zeros_like(matrix)
        for first, last, block, tanh in PointerSoftcapNll.capped(hidden, matrix, ctx.softcap, ctx.bug):
            d = logprobs[:, first:last].exp()
            d -= (labels[:, None] == torch.arange(first, last)).to(d.dtype)
            d *= (1 - tanh**2) * upstream[:, None]
            d_hidden += d @ block.t()
            d_matrix[:, first:last] = hidden.t() @ d
        return d_hidden, d_matrix, None, None, None


def pointer_of(bug, name):
    @lossgate.candidate(
        "softcap",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"softcap": lossgate.ANY},
        tiles={"vocab": ROWS},
        name=name,
    )
    def kernel(inputs, options, mesh):
        hidden = inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0)
        losses = PointerSoftcapNll.apply(hidden, inputs.weight.t(), inputs.labels, options.softcap, bug)
        return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


pointer = pointer_of(None, "pointer")

# The kernel gets the weight as a transposed view, but reads its memory as if the view were
# contiguous, with the vocabulary as the fastest dimension, and so takes scrambled columns. The
# author must use the strides of the view, or make it contiguous before taking its pointer.
transposed_weight_read_row_major = pointer_of("row-major", "transposed_weight_read_row_major")

BUGS = {
    "weight_gradient_scaled_every_chunk": ("single", "dp=2"),
    "small_softmax_tiles_skipped": ("single", "cp=2"),
    "hidden_gradient_lost_by_flatten": ("single", "dp=2"),
    "transposed_weight_read_row_major": ("single", "dp=2,cp=2"),
}
RIGHT = {
    "chunked": ("single", "dp=2"),
    "cut": ("single", "cp=2"),
    "linear": ("single", "dp=2"),
    "pointer": ("single", "dp=2,cp=2"),
}
