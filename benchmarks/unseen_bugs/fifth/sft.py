# SPDX-License-Identifier: Apache-2.0
"""SFT kernels and token log-probabilities on whole vocabularies."""

import torch

import lossgate

CHUNK = 4  # tokens of a chunk
TILE = 8  # entries of the vocabulary in a tile


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """LM head and cross-entropy, a chunk of tokens at a time; gradients are computed in forward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, mask, denominator, temperature, bug):
        rows = hidden.shape[0]
        trained_here = mask.sum()
        loss = hidden.new_zeros(())
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, rows, CHUNK):
            part = slice(start, min(start + CHUNK, rows))
            keep = mask[part]
            h = hidden[part].masked_fill(~keep[:, None], 0.0)
            z = h @ weight.T
            if bias is not None:
                z = z + bias
            z = z / temperature
            logp = torch.log_softmax(z, dim=-1)
            count = keep.sum()
            picked = logp.gather(1, labels[part, None]).squeeze(1)
            mean = -picked.masked_fill(~keep, 0.0).sum() / count.clamp(min=1)
            share = trained_here * (h.shape[0] / rows) if bug == "chunk_mean_by_rows" else count
            loss += mean * share / denominator
            d = logp.exp()
            d.scatter_add_(1, labels[part, None], torch.full_like(picked, -1.0)[:, None])
            d.masked_fill_(~keep[:, None], 0.0)
            d *= share / (count.clamp(min=1) * denominator * temperature)
            grad_hidden[part] = d @ weight
            grad_weight += d.T @ h
            if grad_bias is not None:
                grad_bias += d.sum(dim=0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.bug = bug
        return loss

    @staticmethod
    def backward(ctx, upstream):
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        grad_hidden = grad_hidden * upstream
        if ctx.bug != "weight_without_upstream":
            grad_weight = grad_weight * upstream
        if grad_bias is not None:
            grad_bias = grad_bias * upstream
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def chunked_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        precision=lossgate.Precision(grads_in_forward=True),
        supports={"reduction": lossgate.ANY, "temperature": lossgate.ANY, "bias": lossgate.ANY},
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        if options.reduction == "sum":
            denominator = torch.ones_like(inputs.valid_tokens)
        else:
            denominator = inputs.valid_tokens.clamp(min=1)
        return ChunkedLinearCrossEntropy.apply(
            inputs.hidden,
            inputs.weight,
            inputs.bias,
            inputs.labels,
            inputs.mask,
            denominator,
            options.temperature,
            bug,
        )

    return kernel


chunked = chunked_of(None, "chunked")

# The mean of each chunk over its trained tokens is weighted by the chunk's share of all rows, not
# by its number of trained tokens: a chunk with few trained tokens counts as much as a full one.
chunk_mean_by_rows = chunked_of("chunk_mean_by_rows", "chunk_mean_by_rows")

# Backward scales the precomputed gradients of hidden states and bias by the upstream gradient, but
# returns that of the weight as forward computed it.
weight_without_upstream = chunked_of("weight_without_upstream", "weight_without_upstream")


def streamed_logsumexp(z):
    """The logsumexp of each row, by one pass over tiles with a running maximum."""
    top = z.new_full((z.shape[0],), -torch.inf)
    total = z.new_zeros(z.shape[0])
    for start in range(0, z.shape[1], TILE):
        tile = z[:, start : start + TILE]
        new = torch.maximum(top, tile.amax(dim=1))
        shift = new.masked_fill(new == -torch.inf, 0.0)  # no -inf - -inf, where all is suppressed
        total = total * (top - shift).exp() + (tile - shift[:, None]).exp().sum(dim=1)
        top = new
    return top + total.log()


class CrossEntropyWithZ(torch.autograd.Function):
    """Cross-entropy of logits, plus weight * logsumexp^2; backward computes the softmax again."""

    @staticmethod
    def forward(ctx, logits, labels, mask, denominator, z_weight, bug):
        z = logits.masked_fill(~mask[:, None], 0.0)
        lse = streamed_logsumexp(z)
        losses = lse - z.gather(1, labels[:, None]).squeeze(1) + z_weight * lse.square()
        ctx.save_for_backward(z, lse, labels, mask, denominator)
        ctx.z_weight, ctx.bug = z_weight, bug
        return losses.masked_fill(~mask, 0.0).sum() / denominator

    @staticmethod
    def backward(ctx, upstream):
        z, lse, labels, mask, denominator = ctx.saved_tensors
        d = (z - lse[:, None]).exp()
        one = torch.ones_like(d[:, :1])
        slope = (1 + 2 * ctx.z_weight * lse)[:, None]
        if ctx.bug == "z_slope_on_the_label":
            d.scatter_add_(1, labels[:, None], -one)
            d *= slope
        else:
            d *= slope
            d.scatter_add_(1, labels[:, None], -one)
        d *= upstream / denominator
        return d.masked_fill(~mask[:, None], 0.0), None, None, None, None, None


def with_z_of(bug, name):
    @lossgate.candidate(
        "z_loss",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"z_loss_weight": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        return CrossEntropyWithZ.apply(
            inputs.logits,
            inputs.labels,
            inputs.mask,
            inputs.valid_tokens.clamp(min=1),
            options.z_loss_weight,
            bug,
        )

    return kernel


with_z = with_z_of(None, "with_z")

# The factor 1 + 2 w lse of the z-loss multiplies softmax minus one-hot in backward, where it
# belongs to the softmax alone: the label's entry is off by 2 w lse.
z_slope_on_the_label = with_z_of("z_slope_on_the_label", "z_slope_on_the_label")


class CappedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits that are soft-capped and divided by a temperature, in one pass."""

    @staticmethod
    def forward(ctx, logits, labels, mask, denominator, temperature, softcap, bug):
        z = logits.masked_fill(~mask[:, None], 0.0)
        slope = None
        if bug == "temperature_before_cap":
            z = z / temperature
        if softcap is not None:
            t = torch.tanh(z / softcap)
            z, slope = softcap * t, 1 - t * t
        if bug != "temperature_before_cap":
            z = z / temperature
        lse = streamed_logsumexp(z)
        ctx.save_for_backward(z, lse, slope, labels, mask, denominator)
        ctx.temperature = temperature
        losses = lse - z.gather(1, labels[:, None]).squeeze(1)
        return losses.masked_fill(~mask, 0.0).sum() / denominator

    @staticmethod
    def backward(ctx, upstream):
        z, lse, slope, labels, mask, denominator = ctx.saved_tensors
        d = (z - lse[:, None]).exp()
        d.scatter_add_(1, labels[:, None], -torch.ones_like(d[:, :1]))
        d *= upstream / (denominator * ctx.temperature)
        if slope is not None:
            d *= slope
        return d.masked_fill(~mask[:, None], 0.0), None, None, None, None, None, None


def capped_of(bug, name):
    @lossgate.candidate(
        "nll",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY, "softcap": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        return CappedCrossEntropy.apply(
            inputs.logits,
            inputs.labels,
            inputs.mask,
            inputs.valid_tokens.clamp(min=1),
            options.temperature,
            options.softcap,
            bug,
        )

    return kernel


capped = capped_of(None, "capped")

# The logits are divided by the temperature before the soft-cap, not after it; backward follows.
temperature_before_cap = capped_of("temperature_before_cap", "temperature_before_cap")


class LogprobsAndEntropy(torch.autograd.Function):
    """Log-probabilities of the labels and entropies, with one backward for both."""

    @staticmethod
    def forward(ctx, logits, labels, temperature, bug):
        z = logits / temperature
        lse = streamed_logsumexp(z)
        logp = z - lse[:, None]
        entropy = -(logp.exp() * logp).sum(dim=1)
        ctx.save_for_backward(logp, entropy, labels)
        ctx.temperature, ctx.bug = temperature, bug
        return logp.gather(1, labels[:, None]).squeeze(1), entropy

    @staticmethod
    def backward(ctx, upstream, upstream_entropy):
        logp, entropy, labels = ctx.saved_tensors
        p = logp.exp()
        d = -p * upstream[:, None]
        d.scatter_add_(1, labels[:, None], upstream[:, None])
        if ctx.bug == "entropy_not_centred":
            d -= upstream_entropy[:, None] * p * (logp + 1)
        else:
            d -= upstream_entropy[:, None] * p * (logp + entropy[:, None])
        return d / ctx.temperature, None, None, None


def with_entropy_of(bug, name):
    @lossgate.candidate(
        "token_logprobs",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY},
        differentiable=("logprobs", "token_entropy"),
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = inputs.logits.masked_fill(~inputs.mask[:, None], 0.0)
        logprobs, entropy = LogprobsAndEntropy.apply(logits, inputs.labels, options.temperature, bug)
        return lossgate.Outputs(logprobs=logprobs, token_entropy=entropy)

    return kernel


with_entropy = with_entropy_of(None, "with_entropy")

# The entropy's gradient is that of -sum p log p by p, times p: -p (log p + 1). The softmax's own
# part is missing, which makes it -p (log p + H).
entropy_not_centred = with_entropy_of("entropy_not_centred", "entropy_not_centred")

BUGS = {
    "chunk_mean_by_rows": ("single",),
    "weight_without_upstream": ("single",),
    "z_slope_on_the_label": ("single",),
    "temperature_before_cap": ("single",),
    "entropy_not_centred": ("single",),
}
RIGHT = ("chunked", "with_z", "capped", "with_entropy")
