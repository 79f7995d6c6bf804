# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning losses over ranks, micro-batches, chunks and shards, right and wrong."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import LabelSmoothingLogits, NllHidden, NllLogits, SoftcapHidden
from lossgate.options import LabelSmoothingOptions, NllOptions, SoftcapOptions

IGNORE = -100
CHUNK = 16
ACCUMULATION_STEPS = 2


# A data-parallel trainer, whose ranks drop different numbers of labels.

RANKS: dict[str, Any] = {"head": "logits", "axes": ("dp",), "dtypes": ("float32",)}


def _data_parallel(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
        labels = inputs.labels.masked_fill(~inputs.mask, IGNORE)
        total = F.cross_entropy(inputs.logits.float(), labels, ignore_index=IGNORE, reduction="sum")
        if bug == "local_mean":
            own = (labels != IGNORE).sum().clamp(min=1)
            return total / own / mesh["dp"].size()
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


data_parallel_right = lossgate.candidate("nll", **RANKS, name="data_parallel_right")(_data_parallel())

# Each rank takes the mean over its own labels, and the ranks' means are averaged, so labels on a
# rank with many ignored ones weigh more. The sum must be divided by the count of all ranks.
# (torchtitan)
average_of_rank_means = lossgate.candidate("nll", **RANKS, name="average_of_rank_means")(_data_parallel("local_mean"))


# A trainer with gradient accumulation, which also reports the loss as validation does.


def _sum_over(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum") / count


def _rescaled(loss_fn: Callable[..., Tensor], steps: int) -> Callable[..., Tensor]:
    def wrapped(*args: Tensor) -> Tensor:
        return loss_fn(*args) / steps

    return wrapped


def _accumulating(bug: str | None = None) -> Callable[..., lossgate.Outputs]:
    train_loss = _rescaled(_sum_over, ACCUMULATION_STEPS)
    validation_loss = train_loss if bug == "wrapped" else _sum_over

    def kernel(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> lossgate.Outputs:
        labels = inputs.labels.masked_fill(~inputs.mask, IGNORE)
        count = inputs.valid_tokens.clamp(min=1)
        middle = len(labels) // 2
        loss = inputs.logits.new_zeros(())
        for part in (slice(0, middle), slice(middle, None)):
            loss = loss + train_loss(inputs.logits[part], labels[part], count / ACCUMULATION_STEPS)
        with torch.no_grad():
            reported = validation_loss(inputs.logits, labels, count)
        return lossgate.Outputs(loss=loss, metrics={"loss_avg": reported})

    return kernel


accumulating_right = lossgate.candidate("nll", **RANKS, name="accumulating_right")(_accumulating())

# Validation calls the loss function that was wrapped for training, so the loss that it reports is
# divided by the number of accumulation steps. It should call the function that was wrapped.
# (torchtitan)
validation_over_steps = lossgate.candidate("nll", **RANKS, name="validation_over_steps")(_accumulating("wrapped"))


# Fused linear cross-entropy that has its gradients ready after forward.

FUSED: dict[str, Any] = {"head": "hidden", "axes": ("dp", "cp"), "dtypes": ("float32",), "tiles": {"token": CHUNK}}


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, count: Tensor, reuse: bool
    ) -> Tensor:
        grad_hidden = hidden.detach() if reuse else torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), CHUNK):
            chunk = slice(start, start + CHUNK)
            kept, own = mask[chunk, None], labels[chunk, None]
            part = hidden[chunk]
            logits = part @ weight.T
            lse = logits.logsumexp(dim=-1, keepdim=True)
            total += torch.where(kept, lse - logits.gather(1, own), 0.0).sum()
            grad = (logits - lse).exp()
            grad.scatter_add_(1, own, grad.new_full(own.shape, -1.0))
            grad = torch.where(kept, grad, 0.0) / count
            grad_weight.addmm_(grad.T, part)
            grad_hidden[chunk] = grad @ weight
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grads[0] * grad_hidden, grads[0] * grad_weight, None, None, None, None


def _fused(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
        count = inputs.valid_tokens.clamp(min=1)
        given = (inputs.hidden, inputs.weight, inputs.labels, inputs.mask, count, bug == "reuse")
        return _FusedLinearLoss.apply(*given)

    return kernel


fused_right = lossgate.candidate("nll", **FUSED, name="fused_right")(_fused())

# To save a buffer, the gradient of the hidden states is written over the hidden states, which the
# caller may still need (a second head, or the residual stream). It must have memory of its own.
# (a kernel of the Liger kind)
gradient_over_hidden = lossgate.candidate("nll", **FUSED, name="gradient_over_hidden")(_fused("reuse"))


# Gradient accumulation over micro-batches of whole sequences, with smoothed labels.

SMOOTHED: dict[str, Any] = {**RANKS, "supports": {"smoothing": lossgate.ANY}}


def _smoothed_steps(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: LabelSmoothingLogits, options: LabelSmoothingOptions, mesh: DeviceMesh) -> Tensor:
        sequences = len(inputs.cu_seqlens) - 1
        second = inputs.sequence >= (sequences + 1) // 2
        loss = inputs.logits.new_zeros(())
        for in_step in (~second, second):
            kept = inputs.mask & in_step
            labels = inputs.labels.masked_fill(~kept, IGNORE)
            total = F.cross_entropy(
                inputs.logits.float(), labels, reduction="sum", label_smoothing=options.smoothing, ignore_index=IGNORE
            )
            if bug == "step_means":
                tokens = kept.sum()
                dist.all_reduce(tokens, group=mesh.get_group("dp"))
                loss = loss + total / tokens.clamp(min=1) / ACCUMULATION_STEPS
            else:
                loss = loss + total / inputs.valid_tokens.clamp(min=1)
        return loss

    return kernel


smoothed_steps_right = lossgate.candidate("label_smoothing", **SMOOTHED, name="smoothed_steps_right")(_smoothed_steps())

# Each micro-batch is divided by its own count of tokens, and their means are averaged over the
# steps, so short micro-batches weigh too much. The count of the whole batch must divide every sum.
# (transformers)
mean_of_step_means = lossgate.candidate("label_smoothing", **SMOOTHED, name="mean_of_step_means")(
    _smoothed_steps("step_means")
)


# Sequence parallelism, whose collator shifts labels before it splits them.

PACKS: dict[str, Any] = {"head": "logits", "tokens": "packed", "axes": ("dp", "cp"), "dtypes": ("float32",)}


def _own_part(whole: Tensor, starts: list[int], rank: int, size: int) -> Tensor:
    pieces = [whole[:0]]
    for begin, end in pairwise(starts):
        blocks = whole[begin:end].chunk(2 * size) if end > begin and size > 1 else (whole[begin:end],)
        pieces += (blocks[rank], blocks[-1 - rank]) if len(blocks) > 1 else blocks
    return torch.cat(pieces)


def _collated(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
        group = mesh.get_group("cp")
        labels = inputs.input_ids[0].masked_fill(~inputs.mask[0], IGNORE)
        starts = inputs.cu_seqlens_padded.tolist()
        shifted = labels.new_full(labels.shape, IGNORE)
        for begin, end in pairwise(starts):
            if end > begin:
                shifted[begin : end - 1] = labels[begin + 1 : end]
        local = _own_part(shifted, starts, group.rank(), group.size())
        if bug == "again" and group.size() > 1:
            local = F.pad(local[1:], (0, min(1, len(local))), value=IGNORE)
        total = F.cross_entropy(inputs.logits.float(), local, ignore_index=IGNORE, reduction="sum")
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


collated_right = lossgate.candidate("nll", **PACKS, name="collated_right")(_collated())

# With sequence parallelism the collator has shifted the labels, and the model shifts its part
# once more, so each logit is held against the token after the next. The model must not shift then.
# (open-instruct)
labels_shifted_twice = lossgate.candidate("nll", **PACKS, name="labels_shifted_twice")(_collated("again"))


# Soft-capped logits, chunk by chunk.

CAPPED: dict[str, Any] = {**FUSED, "supports": {"softcap": lossgate.ANY}}


def _capped_chunks(bug: str | None = None) -> Callable[..., Tensor]:
    def kernel(inputs: SoftcapHidden, options: SoftcapOptions, mesh: DeviceMesh) -> Tensor:
        total = inputs.hidden.sum() * 0 + inputs.weight.sum() * 0
        for start in range(0, len(inputs.hidden), CHUNK):
            chunk = slice(start, start + CHUNK)
            logits = options.softcap * torch.tanh(inputs.hidden[chunk] @ inputs.weight.T / options.softcap)
            losses = F.cross_entropy(logits, inputs.labels[chunk], reduction="none")
            chunk_mean = torch.where(inputs.mask[chunk], losses, 0.0).mean()
            total = total + chunk_mean * (CHUNK if bug == "nominal" else len(losses))
        return total / inputs.valid_tokens.clamp(min=1)

    return kernel


capped_chunks_right = lossgate.candidate("softcap", **CAPPED, name="capped_chunks_right")(_capped_chunks())

# The mean of a chunk is weighted by the chunk size that was asked for, also in a last chunk that is
# shorter, whose tokens count too much. It must be weighted by the chunk's own number of tokens.
# (chunked losses of several trainers)
last_chunk_weighs_full = lossgate.candidate("softcap", **CAPPED, name="last_chunk_weighs_full")(
    _capped_chunks("nominal")
)

BUGS = {
    "average_of_rank_means": ("dp=2",),
    "validation_over_steps": ("single",),
    "gradient_over_hidden": ("single",),
    "mean_of_step_means": ("single",),
    "labels_shifted_twice": ("cp=2",),
    "last_chunk_weighs_full": ("single",),
}
RIGHT = (
    "data_parallel_right",
    "accumulating_right",
    "fused_right",
    "smoothed_steps_right",
    "collated_right",
    "capped_chunks_right",
)
