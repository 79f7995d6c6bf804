# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels of supervised fine-tuning on whole vocabularies, after reports of mistakes."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate

TILE = 4
FLOAT32 = ("float32",)
BFLOAT16 = ("bfloat16",)


def _mean(losses: Tensor, inputs: Any) -> Tensor:
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


# A linear cross-entropy over tiles of the vocabulary, whose softmax is computed as in attention


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, bug):
        rows = torch.arange(len(labels))
        running = hidden.new_zeros(len(hidden), dtype=torch.float32)
        peak = torch.full_like(running, -torch.inf)
        label = torch.zeros_like(running)
        for start in range(0, len(weight), TILE):
            logits = _tile(hidden, weight, bias, start)
            larger = torch.maximum(peak, logits.amax(-1))
            if bug != "sum not rescaled":
                running = running * (peak - larger).exp()
            running = running + (logits - larger[:, None]).exp().sum(-1)
            peak = larger
            here = (labels >= start) & (labels < start + TILE)
            label = torch.where(here, logits[rows, torch.where(here, labels - start, 0)], label)
        lse = peak + running.log()
        ctx.save_for_backward(hidden, weight, bias, labels, lse)
        ctx.bug = bug
        return lse - label

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, bias, labels, lse = ctx.saved_tensors
        rows = torch.arange(len(labels))
        kind = hidden.dtype if ctx.bug == "hidden in bfloat16" else torch.float32
        grad_hidden = torch.zeros_like(hidden, dtype=kind)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(weight), TILE):
            dlogits = (_tile(hidden, weight, bias, start) - lse[:, None]).exp()
            here = (labels >= start) & (labels < start + TILE)
            dlogits[rows, torch.where(here, labels - start, 0)] -= here.float()
            dlogits = dlogits * upstream[:, None]
            grad_hidden += (dlogits @ weight[start : start + TILE].float()).to(kind)
            grad_weight[start : start + TILE] = dlogits.T @ hidden.float()
            if grad_bias is not None:
                grad_bias[start : start + TILE] = dlogits.sum(0)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None


def _tile(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int) -> Tensor:
    logits = hidden.float() @ weight[start : start + TILE].float().T
    return logits if bias is None else logits + bias[start : start + TILE].float()


def _tiled(inputs: Any, bug: str = "") -> Tensor:
    return _mean(_TiledCrossEntropy.apply(inputs.hidden, inputs.weight, inputs.bias, inputs.labels, bug), inputs)


_TILED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "supports": {"bias": lossgate.ANY},
    "tiles": {"vocab": TILE},
}


@lossgate.candidate("nll", dtypes=("float32", "bfloat16"), **_TILED)
def right_tiled(inputs, options, mesh):
    """Rescales the running sum by the growth of the maximum, and adds gradients up in float32."""
    return _tiled(inputs)


@lossgate.candidate("nll", dtypes=FLOAT32, **_TILED)
def online_sum_not_rescaled(inputs, options, mesh):
    """When a tile of the vocabulary has a larger maximum, the sum of exponentials of the earlier
    tiles is not rescaled to it.
    """
    return _tiled(inputs, bug="sum not rescaled")


@lossgate.candidate("nll", dtypes=BFLOAT16, **_TILED)
def hidden_gradient_added_in_bfloat16(inputs, options, mesh):
    """The gradient of the hidden states is added up over tiles of the vocabulary in bfloat16, where
    float32 is declared.
    """
    return _tiled(inputs, bug="hidden in bfloat16")


# Perplexities of sequences, which context parallelism splits


def _perplexity(inputs: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    logprobs = inputs.logits.float().log_softmax(-1).gather(-1, inputs.labels[:, None])[:, 0]
    nll = torch.where(inputs.mask, -logprobs, 0.0)
    with torch.no_grad():
        sequences = len(inputs.cu_seqlens) - 1
        sums = nll.new_zeros(2, sequences)
        sums[0].index_add_(0, inputs.sequence, nll.detach())
        sums[1].index_add_(0, inputs.sequence, inputs.mask.float())
        cp = mesh.get_group("cp")
        count = inputs.trained_sequences * cp.size()
        if bug == "own part":
            count = (sums[1] > 0).sum()
            for axis in ("dp", "cp"):
                dist.all_reduce(count, group=mesh.get_group(axis))
        else:
            dist.all_reduce(sums, group=cp)
        perplexities = torch.where(sums[1] > 0, (sums[0] / sums[1].clamp(min=1)).exp(), 0.0)
        largest = torch.cat([perplexities[sums[1] > 0], nll.new_full((1,), -torch.inf)]).amax()
        average = perplexities.sum() / count.clamp(min=1)
    loss = nll.sum() / inputs.valid_tokens.clamp(min=1)
    return lossgate.Outputs(loss=loss, metrics={"ppl_avg": average, "ppl_max": largest})


@lossgate.candidate("nll", head="logits", axes=("dp", "cp"), dtypes=FLOAT32)
def right_perplexity(inputs, options, mesh):
    """Puts the sums of each sequence together before it takes their exponential."""
    return _perplexity(inputs, mesh)


@lossgate.candidate("nll", head="logits", axes=("dp", "cp"), dtypes=FLOAT32)
def perplexity_of_own_part(inputs, options, mesh):
    """Each context-parallel rank takes the perplexity of its own part of a sequence, as if it were
    a whole one.
    """
    return _perplexity(inputs, mesh, bug="own part")


# Log-probabilities of soft-capped logits with a temperature


class _CappedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, cap, temperature, bug):
        share = None if cap is None else torch.tanh(logits / (temperature * cap if bug == "temperature first" else cap))
        capped = logits if share is None else cap * share
        scaled = capped if bug == "temperature first" and share is not None else capped / temperature
        label = scaled.gather(-1, labels[:, None])[:, 0]
        if bug == "label not capped":
            label = logits.gather(-1, labels[:, None])[:, 0] / temperature
        lse = scaled.logsumexp(-1)
        ctx.save_for_backward((scaled - lse[:, None]).exp(), share, labels)
        ctx.temperature = temperature
        return label - lse

    @staticmethod
    def backward(ctx, upstream):
        softmax, share, labels = ctx.saved_tensors
        grad = -softmax
        grad[torch.arange(len(labels)), labels] += 1
        grad = grad * (upstream / ctx.temperature)[:, None]
        return grad if share is None else grad * (1 - share**2), None, None, None, None


def _capped(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    logits = F.linear(inputs.hidden, inputs.weight, inputs.bias)
    logprobs = _CappedLogprobs.apply(logits, inputs.labels, options.softcap, options.temperature, bug)
    return lossgate.Outputs(logprobs=logprobs)


_CAPPED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(("temperature", "softcap", "bias"), lossgate.ANY),
}


@lossgate.candidate("token_logprobs", **_CAPPED)
def right_capped(inputs, options, mesh):
    """Caps all logits, and divides them by the temperature then."""
    return _capped(inputs, options)


@lossgate.candidate("token_logprobs", **_CAPPED)
def temperature_before_softcap(inputs, options, mesh):
    """The temperature divides the logits before the soft-cap, not after it."""
    return _capped(inputs, options, bug="temperature first")


@lossgate.candidate("token_logprobs", **_CAPPED)
def label_logit_not_capped(inputs, options, mesh):
    """The logit of the label is read before the soft-cap, and the normaliser is that of capped
    logits.
    """
    return _capped(inputs, options, bug="label not capped")


# Log-probabilities in the nucleus


def _nucleus(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    scaled = inputs.logits.float() / options.temperature
    with torch.no_grad():
        ordered = scaled.sort(-1, descending=True).values
        share = ordered.softmax(-1)
        mass = share.cumsum(-1)
        if bug != "mass with the token":
            mass = mass - share
        inside = mass < options.top_p
        inside[:, :1] = True
        if options.top_p == 1.0:
            inside[:] = True
        least = torch.where(inside, ordered, torch.inf).amin(-1, keepdim=True)
    kept = scaled.masked_fill(scaled < least, -torch.inf)
    logprobs = kept.log_softmax(-1).gather(-1, inputs.labels[:, None])[:, 0]
    return lossgate.Outputs(logprobs=torch.where(logprobs > -torch.inf, logprobs, -torch.inf))


_NUCLEUS: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp",),
    "dtypes": FLOAT32,
    "supports": {"temperature": lossgate.ANY, "top_p": lossgate.ANY},
}


@lossgate.candidate("token_logprobs", **_NUCLEUS)
def right_nucleus(inputs, options, mesh):
    """Keeps tokens as long as the probability of all above them is less than top-p."""
    return _nucleus(inputs, options)


@lossgate.candidate("token_logprobs", **_NUCLEUS)
def nucleus_without_last_token(inputs, options, mesh):
    """The nucleus ends before the token with which its probability reaches top-p."""
    return _nucleus(inputs, options, bug="mass with the token")


# Entropies after log-probabilities, from the same logits


class _ScaledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, bug):
        scaled = logits.float()
        scaled = scaled.div_(temperature) if bug == "in place" else scaled / temperature
        softmax = scaled.softmax(-1)
        ctx.save_for_backward(softmax, labels)
        ctx.temperature, ctx.bug = temperature, bug
        return scaled.log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        softmax, labels = ctx.saved_tensors
        if ctx.bug == "first upstream":
            upstream = upstream[:1].expand_as(upstream)
        grad = F.one_hot(labels, softmax.shape[-1]) - softmax
        return grad * (upstream / ctx.temperature)[:, None], None, None, None


def _scaled(inputs: Any, options: Any, bug: str = "") -> lossgate.Outputs:
    logits = inputs.logits * 1.0  # As the logit scale of a model makes them.
    logprobs = _ScaledLogprobs.apply(logits, inputs.labels, options.temperature, bug)
    with torch.no_grad():
        log_p = (logits.float() / options.temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    return lossgate.Outputs(logprobs=logprobs, token_entropy=entropy)


_SCALED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": {"temperature": lossgate.ANY},
}


@lossgate.candidate("token_logprobs", **_SCALED)
def right_scaled(inputs, options, mesh):
    """Leaves the logits as they are for the entropies."""
    return _scaled(inputs, options)


@lossgate.candidate("token_logprobs", **_SCALED)
def entropy_of_logits_scaled_in_place(inputs, options, mesh):
    """The log-probabilities divide the logits by the temperature in place, and the entropies divide
    them once more.
    """
    return _scaled(inputs, options, bug="in place")


@lossgate.candidate("token_logprobs", **_SCALED)
def upstream_of_first_token(inputs, options, mesh):
    """Backward scales the gradients of all tokens by the upstream gradient of the first one."""
    return _scaled(inputs, options, bug="first upstream")


# A pack whose sequences are cut out one by one


def _cut(inputs: Any, options: Any, bug: str = "") -> Tensor:
    bounds = inputs.cu_seqlens if bug == "unpadded" else inputs.cu_seqlens_padded
    ids, mask = inputs.input_ids[0], inputs.mask[0]
    total = inputs.logits[:0].float().sum()
    for start, end in pairwise(bounds.tolist()):
        logits = inputs.logits[start : max(start, end - 1)].float()
        losses = F.cross_entropy(logits, ids[start + 1 : end], reduction="none")
        total = total + torch.where(mask[start + 1 : end], losses, 0.0).sum()
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


_CUT: dict[str, Any] = {
    "head": "logits",
    "tokens": "packed",
    "axes": ("dp",),
    "dtypes": FLOAT32,
    "supports": {"reduction": lossgate.ANY},
}


@lossgate.candidate("nll", **_CUT)
def right_cut(inputs, options, mesh):
    """Takes the starts of sequences in the padded pack."""
    return _cut(inputs, options)


@lossgate.candidate("nll", **_CUT)
def padded_pack_cut_without_padding(inputs, options, mesh):
    """Sequences are cut out of the padded pack at the starts that they have without padding."""
    return _cut(inputs, options, bug="unpadded")


# Label smoothing from torch's log-softmax


def _smoothed(inputs: Any, options: Any, bug: str = "") -> Tensor:
    smoothing = options.smoothing
    vocab = inputs.logits.shape[-1]
    if bug == "other classes":
        smoothing = smoothing * vocab / max(vocab - 1, 1)
    log_p = inputs.logits.float().log_softmax(-1)
    label = log_p.gather(-1, inputs.labels[:, None])[:, 0]
    return _mean(-(1 - smoothing) * label - smoothing * log_p.mean(-1), inputs)


_SMOOTHED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": {"smoothing": lossgate.ANY},
}


@lossgate.candidate("label_smoothing", **_SMOOTHED)
def right_smoothed(inputs, options, mesh):
    """Spreads the smoothing over the whole vocabulary, the label with it."""
    return _smoothed(inputs, options)


@lossgate.candidate("label_smoothing", **_SMOOTHED)
def smoothing_over_other_classes(inputs, options, mesh):
    """The smoothing is spread over the classes other than the label, so its weight is too large by
    V / (V - 1).
    """
    return _smoothed(inputs, options, bug="other classes")


BUGS = {
    "online_sum_not_rescaled": ("single",),
    "hidden_gradient_added_in_bfloat16": ("single",),
    "perplexity_of_own_part": ("cp=2",),
    "temperature_before_softcap": ("single",),
    "label_logit_not_capped": ("single",),
    "nucleus_without_last_token": ("single",),
    "entropy_of_logits_scaled_in_place": ("single",),
    "upstream_of_first_token": ("single",),
    "padded_pack_cut_without_padding": ("single",),
    "smoothing_over_other_classes": ("single",),
}
RIGHT = (
    "right_tiled",
    "right_perplexity",
    "right_capped",
    "right_nucleus",
    "right_scaled",
    "right_cut",
    "right_smoothed",
)
