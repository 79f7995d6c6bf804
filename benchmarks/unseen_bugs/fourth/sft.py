# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning kernels that never hold all the logits, and a few losses on logits."""

import torch
import torch.nn.functional as F

import lossgate

CHUNK = 4


class ChunkedLinearNll(torch.autograd.Function):
    """Sum of the NLL over trained tokens; logits are formed by chunks, and again in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, mask, temperature, bug):
        ctx.save_for_backward(hidden, weight, bias, labels, mask)
        ctx.temperature, ctx.bug = temperature, bug
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            logp = torch.log_softmax(ChunkedLinearNll.logits(hidden[rows], weight, bias, temperature), -1)
            picked = logp.gather(1, labels[rows, None]).squeeze(1)
            total -= torch.where(mask[rows], picked, 0.0).sum()
        return total

    @staticmethod
    def logits(hidden, weight, bias, temperature):
        logits = hidden @ weight.T
        if bias is not None:
            logits = logits + bias
        return logits / temperature

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, bias, labels, mask = ctx.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            h = torch.where(mask[rows, None], hidden[rows], 0.0)
            d = torch.softmax(ChunkedLinearNll.logits(h, weight, bias, ctx.temperature), -1)
            d.scatter_add_(1, labels[rows, None], -torch.ones_like(d[:, :1]))
            d = torch.where(mask[rows, None], d, 0.0)
            if ctx.bug != "temperature_backward":
                d = d / ctx.temperature
            scaled = d * grad
            d_hidden[rows] = scaled @ weight
            d_weight += (d if ctx.bug == "weight_upstream" else scaled).T @ h
            if d_bias is not None:
                if ctx.bug == "bias_last_chunk":
                    d_bias = scaled.sum(0)
                else:
                    d_bias += scaled.sum(0)
        return d_hidden, d_weight, d_bias, None, None, None, None


def chunked(bug, name):
    @lossgate.candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"temperature": lossgate.ANY, "bias": lossgate.ANY},
        tiles={"token": CHUNK},
        name=name,
    )
    def kernel(inputs, options, mesh):
        total = ChunkedLinearNll.apply(
            inputs.hidden, inputs.weight, inputs.bias, inputs.labels, inputs.mask, options.temperature, bug
        )
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


chunked_nll = chunked(None, "chunked_nll")

# The bias gradient is assigned in the loop, not added up: only the last chunk's remains.
bias_last_chunk = chunked("bias_last_chunk", "bias_last_chunk")

# Backward forgets that the logits were divided by the temperature: gradients lack the 1 / T.
temperature_backward = chunked("temperature_backward", "temperature_backward")

# The gradient of the weight is not multiplied by the upstream gradient; that of hidden is.
weight_upstream = chunked("weight_upstream", "weight_upstream")


class StraightThroughCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, cap):
        return cap * torch.tanh(logits / cap)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def capped(bug, name):
    @lossgate.candidate(
        "softcap", head="logits", axes=("dp", "cp"), dtypes=("float32",), supports={"softcap": lossgate.ANY}, name=name
    )
    def kernel(inputs, options, mesh):
        logits = torch.where(inputs.mask[:, None], inputs.logits, 0.0)
        if bug:
            logits = StraightThroughCap.apply(logits, options.softcap)
        else:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        losses = F.cross_entropy(logits, inputs.labels, reduction="none")
        return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


capped_nll = capped(False, "capped_nll")

# The backward of the soft-cap is the identity: the factor 1 - tanh(z / c)^2 is missing.
softcap_straight_through = capped(True, "softcap_straight_through")


def smoothed(bug, name):
    @lossgate.candidate(
        "label_smoothing",
        head="logits",
        axes=("dp", "cp"),
        dtypes=("float32",),
        supports={"smoothing": lossgate.ANY},
        name=name,
    )
    def kernel(inputs, options, mesh):
        logits = inputs.logits if bug else torch.where(inputs.mask[:, None], inputs.logits, 0.0)
        logp = torch.log_softmax(logits, -1)
        nll = -logp.gather(1, inputs.labels[:, None]).squeeze(1)
        smooth = -logp.mean(-1)
        nll = torch.where(inputs.mask, nll, 0.0)
        if not bug:
            smooth = torch.where(inputs.mask, smooth, 0.0)
        a = options.smoothing
        return ((1 - a) * nll + a * smooth).sum() / inputs.valid_tokens.clamp(min=1)

    return kernel


smoothed_nll = smoothed(False, "smoothed_nll")

# Ignored tokens are zeroed in the NLL only; the smoothing term is summed over them, too.
smoothing_of_ignored = smoothed(True, "smoothing_of_ignored")


def from_ids(bug, name):
    @lossgate.candidate("nll", head="logits", axes=("dp", "cp"), dtypes=("float32",), name=name)
    def kernel(inputs, options, mesh):
        labels = torch.roll(inputs.input_ids, -1) if bug else inputs.labels
        targets = labels.masked_fill(~inputs.mask, -100)
        return F.cross_entropy(inputs.logits, targets, reduction="sum") / inputs.valid_tokens.clamp(min=1)

    return kernel


plain_nll = from_ids(False, "plain_nll")

# Labels are shifted after the split over cp: the last token of each piece gets a wrong label.
ids_rolled_on_each_rank = from_ids(True, "ids_rolled_on_each_rank")

BUGS = {
    "bias_last_chunk": ("single",),
    "temperature_backward": ("single",),
    "weight_upstream": ("single",),
    "softcap_straight_through": ("single",),
    "smoothing_of_ignored": ("single",),
    "ids_rolled_on_each_rank": ("cp=2",),
}
RIGHT = ("chunked_nll", "capped_nll", "smoothed_nll", "plain_nll")
