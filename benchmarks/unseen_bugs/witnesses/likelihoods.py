# SPDX-License-Identifier: Apache-2.0
"""Wrong log-probabilities and what is made of them, on whole vocabularies."""

import torch
import torch.nn.functional as F

import lossgate

CHUNK = 4  # tokens
ROWS = 4  # of the vocabulary


def mean(losses, inputs):
    """The sum over trained tokens, over the trained tokens of all ranks."""
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


# Labels are shifted after the split over cp: the last token of each piece gets a wrong label.
@lossgate.candidate("nll", head="logits", axes=("dp", "cp"), dtypes=("float32",))
def ids_rolled_on_each_rank(inputs, options, mesh):
    labels = torch.roll(inputs.input_ids, -1)
    return mean(F.cross_entropy(inputs.logits, labels, reduction="none"), inputs)


def next_ids_of_pieces(inputs, cp):
    """Shifts the ids within each contiguous piece of this rank; the last of a piece is ignored."""
    targets = torch.full_like(inputs.labels, -100)
    start = 0
    for length in (inputs.cu_seqlens_padded.diff() // cp).tolist():
        for piece in [length] if cp == 1 else [length // 2, length - length // 2]:
            targets[start : start + piece - 1] = inputs.input_ids[start + 1 : start + piece]
            start += piece
    return targets


# Each rank shifts the ids of its own shard, so the last token of a contiguous piece has no next
# token and is ignored, although the next piece starts with its label. The author would have to
# shift the whole sequences before they are split, or fetch the first id of the next piece.
# (torchtitan, TRL)
@lossgate.candidate("nll", head="logits", axes=("dp", "cp"), dtypes=("float32",), supports={"reduction": lossgate.ANY})
def shifted_after_the_split(inputs, options, mesh):
    targets = next_ids_of_pieces(inputs, mesh.get_group("cp").size()).masked_fill(~inputs.mask, -100)
    total = F.cross_entropy(inputs.logits.float(), targets, reduction="sum")
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


# The running sum of the loss is in the dtype of a float16 model, where it rounds to 11 bits, and
# ends at 65504. The author would add up in float32.
@lossgate.candidate(
    "nll",
    head="logits",
    axes=("dp", "cp"),
    dtypes=("float16",),
    supports={"reduction": lossgate.ANY, "temperature": lossgate.ANY},
)
def running_sum_in_float16(inputs, options, mesh):
    mask, count = inputs.mask, inputs.valid_tokens.clamp(min=1)
    logits = inputs.logits.float().masked_fill(~mask[:, None], 0.0) / options.temperature
    losses = F.cross_entropy(logits, inputs.labels, reduction="none").masked_fill(~mask, 0.0)
    total = torch.zeros((), dtype=torch.float16)
    for part in losses.split(CHUNK):
        total = total + part.sum().half()
    return total.float() / count if options.reduction == "mean" else total.float()


class NllOfSavedSoftmax(torch.autograd.Function):
    """Negative log-likelihoods. The softmax is kept for backward in bfloat16, to save memory."""

    @staticmethod
    def forward(ctx, logits, labels):
        logprobs = logits.log_softmax(-1)
        ctx.save_for_backward(logprobs.exp().bfloat16(), labels)
        return -logprobs.gather(-1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        softmax, labels = ctx.saved_tensors
        grad = softmax.float() * upstream[:, None]
        grad[torch.arange(len(labels)), labels] -= upstream
        return grad, None


# A kernel that declares nothing of the softmax must keep it in float32.
@lossgate.candidate("nll", head="logits", axes=("dp",), dtypes=("float32",))
def softmax_saved_in_bfloat16(inputs, options, mesh):
    return mean(NllOfSavedSoftmax.apply(inputs.logits, inputs.labels), inputs)


# The reported entropy is the mean over ranks of each rank's own mean, whatever their numbers of
# tokens. The author would divide the sum of each rank by the trained tokens of all.
@lossgate.candidate(
    "nll",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=("float32",),
    supports={"temperature": lossgate.ANY, "bias": lossgate.ANY},
)
def entropy_mean_of_rank_means(inputs, options, mesh):
    logits = F.linear(inputs.hidden, inputs.weight, inputs.bias)
    log_p = F.log_softmax(logits / options.temperature, dim=-1)
    losses = -log_p.gather(-1, inputs.labels[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)[inputs.mask].sum() / inputs.mask.sum().clamp(min=1)
        ranks = mesh.get_group("dp").size() * mesh.get_group("cp").size()
    return lossgate.Outputs(loss=mean(losses, inputs), metrics={"entropy": entropy / ranks})


# The smoothing is spread over the classes other than the label, so its weight is too large by
# V / (V - 1).
@lossgate.candidate(
    "label_smoothing", head="logits", axes=("dp", "cp"), dtypes=("float32",), supports={"smoothing": lossgate.ANY}
)
def smoothing_over_other_classes(inputs, options, mesh):
    vocab = inputs.logits.shape[-1]
    smoothing = options.smoothing * vocab / max(vocab - 1, 1)
    log_p = inputs.logits.float().log_softmax(-1)
    label = log_p.gather(-1, inputs.labels[:, None])[:, 0]
    return mean(-(1 - smoothing) * label - smoothing * log_p.mean(-1), inputs)


class CappedLogprobs(torch.autograd.Function):
    """Log-probabilities of the labels. The temperature divides the logits before the soft-cap."""

    @staticmethod
    def forward(ctx, logits, labels, cap, temperature):
        share = None if cap is None else torch.tanh(logits / (temperature * cap))
        scaled = logits / temperature if share is None else cap * share
        lse = scaled.logsumexp(-1)
        ctx.save_for_backward((scaled - lse[:, None]).exp(), share, labels)
        ctx.temperature = temperature
        return scaled.gather(-1, labels[:, None])[:, 0] - lse

    @staticmethod
    def backward(ctx, upstream):
        softmax, share, labels = ctx.saved_tensors
        grad = -softmax
        grad[torch.arange(len(labels)), labels] += 1
        grad = grad * (upstream / ctx.temperature)[:, None]
        return grad if share is None else grad * (1 - share**2), None, None, None


# The author would cap the logits and divide what is capped.
@lossgate.candidate(
    "token_logprobs",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=("float32",),
    supports={"temperature": lossgate.ANY, "softcap": lossgate.ANY, "bias": lossgate.ANY},
)
def temperature_before_softcap(inputs, options, mesh):
    logits = F.linear(inputs.hidden, inputs.weight, inputs.bias)
    logprobs = CappedLogprobs.apply(logits, inputs.labels, options.softcap, options.temperature)
    return lossgate.Outputs(logprobs=logprobs)


# The nucleus ends before the token with which its probability reaches top-p. The author would
# compare the mass before each token, not the mass with it.
@lossgate.candidate(
    "token_logprobs",
    head="logits",
    axes=("dp",),
    dtypes=("float32",),
    supports={"temperature": lossgate.ANY, "top_p": lossgate.ANY},
)
def nucleus_without_last_token(inputs, options, mesh):
    scaled = inputs.logits.float() / options.temperature
    with torch.no_grad():
        ordered = scaled.sort(-1, descending=True).values
        inside = (ordered.softmax(-1).cumsum(-1) < options.top_p) | (options.top_p == 1.0)
        inside[:, :1] = True
        least = torch.where(inside, ordered, torch.inf).amin(-1, keepdim=True)
    log_p = scaled.masked_fill(scaled < least, -torch.inf).log_softmax(-1)
    logprobs = log_p.gather(-1, inputs.labels[:, None])[:, 0]
    # No gradient reaches the logits from a label that is filtered out.
    return lossgate.Outputs(logprobs=torch.where(logprobs > -torch.inf, logprobs, -torch.inf))


def columns_of(matrix, first, last):
    """Loads columns of a ``[width, vocab]`` matrix from memory, as if it were contiguous."""
    width, vocab = matrix.shape
    return matrix.as_strided((width, last - first), (vocab, 1), matrix.storage_offset() + first)


class PointerSoftcapNll(torch.autograd.Function):
    """Negative log-likelihoods of soft-capped logits, for a weight ``[width, vocab]``."""

    @staticmethod
    def capped(hidden, matrix, softcap):
        vocab = matrix.shape[1]
        for first in range(0, vocab, ROWS):
            last = min(first + ROWS, vocab)
            block = columns_of(matrix, first, last)
            yield first, last, block, torch.tanh(hidden @ block / softcap)

    @staticmethod
    def forward(ctx, hidden, matrix, labels, softcap):
        blocks = [softcap * tanh for *_, tanh in PointerSoftcapNll.capped(hidden, matrix, softcap)]
        logprobs = torch.log_softmax(torch.cat(blocks, dim=1), dim=1)
        ctx.save_for_backward(hidden, matrix, labels, logprobs)
        ctx.softcap = softcap
        return -logprobs.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(ctx, upstream):
        hidden, matrix, labels, logprobs = ctx.saved_tensors
        d_hidden, d_matrix = torch.zeros_like(hidden), torch.zeros_like(matrix)
        for first, last, block, tanh in PointerSoftcapNll.capped(hidden, matrix, ctx.softcap):
            d = logprobs[:, first:last].exp()
            d -= (labels[:, None] == torch.arange(first, last)).to(d.dtype)
            d *= (1 - tanh**2) * upstream[:, None]
            d_hidden += d @ block.t()
            d_matrix[:, first:last] = hidden.t() @ d
        return d_hidden, d_matrix, None, None


# The kernel gets the weight as a transposed view, but reads its memory as if the view were
# contiguous, with the vocabulary as the fastest dimension, and so takes scrambled columns. The
# author must use the strides of the view, or make it contiguous before taking its pointer.
@lossgate.candidate(
    "softcap",
    head="hidden",
    axes=("dp", "cp"),
    dtypes=("float32",),
    supports={"softcap": lossgate.ANY},
    tiles={"vocab": ROWS},
)
def transposed_weight_read_row_major(inputs, options, mesh):
    hidden = inputs.hidden.masked_fill(~inputs.mask[:, None], 0.0)
    return mean(PointerSoftcapNll.apply(hidden, inputs.weight.t(), inputs.labels, options.softcap), inputs)


BUGS = {
    "ids_rolled_on_each_rank": ("cp=2",),
    "shifted_after_the_split": ("cp=2",),
    "running_sum_in_float16": ("dp=2",),
    "softmax_saved_in_bfloat16": ("single",),
    "entropy_mean_of_rank_means": ("dp=2",),
    "smoothing_over_other_classes": ("single",),
    "temperature_before_softcap": ("single",),
    "nucleus_without_last_token": ("single",),
    "transposed_weight_read_row_major": ("dp=2,cp=2",),
}
