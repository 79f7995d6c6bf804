# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over rows, packs and chunks of tokens, right and wrong."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import LabelSmoothingLogits, NllHidden, NllLogits, ZLossHidden
from lossgate.options import LabelSmoothingOptions, NllOptions, ZLossOptions

CHUNK = 16

# A trainer that pads sequences to rows, and shifts labels and masks itself.

ROWS: dict[str, Any] = {"head": "logits", "tokens": "rows", "axes": ("dp",), "dtypes": ("float32", "bfloat16")}


def _rows_nll(inputs: NllLogits, mesh: DeviceMesh, bug: str = "") -> Tensor:
    rows, width = inputs.input_ids.shape
    lengths = inputs.cu_seqlens.diff().tolist()
    padded = inputs.cu_seqlens_padded.diff().tolist()
    parts = inputs.logits.split(padded)
    filled = [F.pad(part[:length], (0, 0, 0, width - length)) for part, length in zip(parts, lengths, strict=True)]
    logits = torch.stack(filled) if rows else inputs.logits.reshape(0, width, inputs.logits.shape[-1])

    shift_logits = logits[:, :-1].float()
    shift_labels = inputs.input_ids[:, 1:]
    loss_mask = inputs.mask[:, :-1] if bug == "mask_left" else inputs.mask[:, 1:]
    losses = F.cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
    total = torch.where(loss_mask.flatten(), losses, 0.0).sum()
    return total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", **ROWS)
def rows_right(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Shifts labels and mask alike."""
    return _rows_nll(inputs, mesh)


@lossgate.candidate("nll", **ROWS)
def sft_mask_left(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """The mask loses its last column where the labels lose their first, so it is one token late."""
    return _rows_nll(inputs, mesh, bug="mask_left")


# A trainer with context parallelism, which gets whole packs and takes its zigzag part of them.

PACKS: dict[str, Any] = {
    "head": "logits",
    "tokens": "packed",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"reduction": lossgate.ANY},
}


def _zigzag(whole: Tensor, starts: list[int], rank: int, size: int) -> Tensor:
    if size == 1:
        return whole
    parts = [whole[:0]]
    for begin, end in pairwise(starts):
        width = (end - begin) // (2 * size)
        for turn in (rank, 2 * size - 1 - rank):
            parts.append(whole[begin + turn * width : begin + (turn + 1) * width])
    return torch.cat(parts)


def _next(values: Tensor, ends: Tensor, fill: int | bool) -> Tensor:
    shifted = values.roll(-1)
    shifted[ends] = fill
    return shifted


def _pack_nll(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("cp")
    bounds = inputs.cu_seqlens_padded
    starts = bounds.tolist()
    ends = (bounds[1:] - 1)[bounds.diff() > 0].long()
    ids, mask = inputs.input_ids[0], inputs.mask[0]

    if bug == "shift_in_model":
        labels, mask = (_zigzag(whole, starts, group.rank(), group.size()) for whole in (ids, mask))
        local_ends = (ends + 1) // group.size() - 1
        labels, mask = _next(labels, local_ends, 0), _next(mask, local_ends, False)
    else:
        labels, mask = _next(ids, ends, 0), _next(mask, ends, False)
        labels, mask = (_zigzag(whole, starts, group.rank(), group.size()) for whole in (labels, mask))

    losses = F.cross_entropy(inputs.logits.float(), labels, reduction="none")
    total = torch.where(mask, losses, 0.0).sum()
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", **PACKS)
def packs_right(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Shifts the whole pack, and splits it over the ranks afterwards."""
    return _pack_nll(inputs, options, mesh)


@lossgate.candidate("nll", **PACKS)
def shift_after_split(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Labels are shifted within a rank's shard, so the last token of a piece has a wrong label."""
    return _pack_nll(inputs, options, mesh, bug="shift_in_model")


# Fused linear cross-entropy, which makes its gradients in forward, chunk by chunk.

FUSED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"reduction": lossgate.ANY, "temperature": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor,
        count: Tensor | None,
        temperature: float,
        bug: str,
    ) -> Tensor:
        total = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), CHUNK):
            stop = start + CHUNK
            part, kept = hidden[start:stop], mask[start:stop]
            own = labels[start:stop, None]
            logprobs = torch.log_softmax(part @ weight.T / temperature, dim=-1)
            picked = logprobs.gather(1, own)[:, 0]
            total -= torch.where(kept, picked, 0.0).sum()
            grad = logprobs.exp().scatter_add_(1, own, -torch.ones_like(own, dtype=part.dtype))
            grad = torch.where(kept[:, None], grad, 0.0) / temperature
            grad_hidden[start:stop] = grad @ weight
            grad_weight += grad.T @ part
        if count is not None:
            total /= count
            if bug != "loss_alone_divided":
                grad_hidden /= count
                grad_weight /= count
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        return upstream * grad_hidden, upstream * grad_weight, None, None, None, None, None


def _fused_nll(inputs: NllHidden, options: NllOptions, bug: str = "") -> Tensor:
    count = None if options.reduction == "sum" else inputs.valid_tokens.clamp(min=1)
    given = (inputs.hidden, inputs.weight, inputs.labels, inputs.mask, count, options.temperature, bug)
    return _FusedLinearCrossEntropy.apply(*given)


@lossgate.candidate("nll", **FUSED)
def fused_right(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Divides the loss and both gradients by the count."""
    return _fused_nll(inputs, options)


@lossgate.candidate("nll", **FUSED)
def loss_alone_divided(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """The mean divides the loss that is returned, but not the gradients made with it."""
    return _fused_nll(inputs, options, bug="loss_alone_divided")


# Label smoothing whose gradient is made in forward.

SMOOTHED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"smoothing": lossgate.ANY},
}


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor, count: Tensor, smoothing: float, bug: str
    ) -> Tensor:
        vocab = logits.shape[-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        nll = -logprobs.gather(1, labels[:, None])[:, 0]
        smooth = -logprobs.mean(dim=-1)
        nll = torch.where(mask, nll, 0.0)
        if bug != "smoothing_unmasked":
            smooth = torch.where(mask, smooth, 0.0)
        grad = logprobs.exp() - smoothing / vocab
        grad.scatter_add_(1, labels[:, None], torch.full_like(nll[:, None], smoothing - 1))
        ctx.save_for_backward(torch.where(mask[:, None], grad, 0.0) / count)
        return ((1 - smoothing) * nll + smoothing * smooth).sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grads[0] * grad, None, None, None, None, None


def _smoothed(inputs: LabelSmoothingLogits, options: LabelSmoothingOptions, bug: str = "") -> Tensor:
    count = inputs.valid_tokens.clamp(min=1)
    return _SmoothedCrossEntropy.apply(inputs.logits, inputs.labels, inputs.mask, count, options.smoothing, bug)


@lossgate.candidate("label_smoothing", **SMOOTHED)
def smoothed_right(inputs: LabelSmoothingLogits, options: LabelSmoothingOptions, mesh: DeviceMesh) -> Tensor:
    """Leaves masked tokens out of both terms."""
    return _smoothed(inputs, options)


@lossgate.candidate("label_smoothing", **SMOOTHED)
def smoothing_unmasked(inputs: LabelSmoothingLogits, options: LabelSmoothingOptions, mesh: DeviceMesh) -> Tensor:
    """Ignored tokens still add their smoothing term to the loss, though their gradient is zero."""
    return _smoothed(inputs, options, bug="smoothing_unmasked")


# The z-loss over chunks of tokens, which writes per-token results and adds up those of the head.

CHUNKED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"z_loss_weight": lossgate.ANY, "bias": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


class _ChunkedZLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        mask: Tensor,
        z_weight: float,
        bug: str,
    ) -> Tensor:
        tokens = len(hidden)
        losses, grad_hidden = hidden.new_zeros(tokens), torch.zeros_like(hidden)
        grad_weight, grad_bias = torch.zeros_like(weight), weight.new_zeros(len(weight))
        for start in range(0, tokens, CHUNK):
            if bug == "tail_moved_back" and tokens >= CHUNK:
                start = min(start, tokens - CHUNK)  # so that all chunks have the same shape
            chunk = slice(start, start + CHUNK)
            kept, own = mask[chunk], labels[chunk, None]
            logits = F.linear(hidden[chunk], weight, bias)
            lse = logits.logsumexp(dim=-1)
            nll = lse - logits.gather(1, own)[:, 0]
            losses[chunk] = torch.where(kept, nll + z_weight * lse.square(), 0.0)
            grad = (logits - lse[:, None]).exp() * (1 + 2 * z_weight * lse)[:, None]
            grad.scatter_add_(1, own, -torch.ones_like(own, dtype=grad.dtype))
            grad = torch.where(kept[:, None], grad, 0.0)
            grad_hidden[chunk] = grad @ weight
            grad_weight.addmm_(grad.T, hidden[chunk])
            grad_bias += grad.sum(dim=0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.has_bias = bias is not None
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = (grads[0] * grad for grad in ctx.saved_tensors)
        return of_hidden, of_weight, of_bias if ctx.has_bias else None, None, None, None, None


def _chunked_z_loss(inputs: ZLossHidden, options: ZLossOptions, bug: str = "") -> Tensor:
    head = (inputs.hidden, inputs.weight, inputs.bias)
    total = _ChunkedZLoss.apply(*head, inputs.labels, inputs.mask, options.z_loss_weight, bug)
    return total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("z_loss", **CHUNKED)
def chunked_right(inputs: ZLossHidden, options: ZLossOptions, mesh: DeviceMesh) -> Tensor:
    """Ends with a chunk that may be short."""
    return _chunked_z_loss(inputs, options)


@lossgate.candidate("z_loss", **CHUNKED)
def tail_added_twice(inputs: ZLossHidden, options: ZLossOptions, mesh: DeviceMesh) -> Tensor:
    """The last chunk is moved back to be full: the head's gradients get its first tokens twice."""
    return _chunked_z_loss(inputs, options, bug="tail_moved_back")


BUGS = {
    "sft_mask_left": ("single",),
    "shift_after_split": ("cp=2",),
    "loss_alone_divided": ("single",),
    "smoothing_unmasked": ("single",),
    "tail_added_twice": ("single",),
}
RIGHT = ("rows_right", "packs_right", "fused_right", "smoothed_right", "chunked_right")
