# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning losses of trainers, right and wrong: chats, counts, fused heads and split heads."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import LabelSmoothingHidden, NllHidden, NllLogits, NllLogprobs
from lossgate.options import LabelSmoothingOptions, NllOptions

CHUNK = 8
LOSS_SCALE = 2.0**10

# A dataset of chats: everything up to the response is prompt, and has no loss.

CHATS: dict[str, Any] = {
    "head": "logits",
    "tokens": "rows",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": {"reduction": lossgate.ANY},
}


def _chat_nll(inputs: NllLogits, options: NllOptions, bug: str | None = None) -> Tensor:
    rows, width = inputs.input_ids.shape
    total = inputs.logits[:0].float().sum()
    if rows and width > 1:
        positions = torch.arange(width, device=inputs.input_ids.device)
        assistant = inputs.mask & (positions > 0)
        prompt_len = torch.where(assistant.any(dim=1), assistant.int().argmax(dim=1), width)
        in_response = positions >= prompt_len[:, None]
        if bug == "first_response_token":
            in_response = positions > prompt_len[:, None]
        labels = inputs.input_ids.masked_fill(~(assistant & in_response), -100)
        lengths, padded = inputs.cu_seqlens.diff().tolist(), inputs.cu_seqlens_padded.diff().tolist()
        for row, (part, length) in enumerate(zip(inputs.logits.split(padded), lengths, strict=True)):
            if length > 1:
                total = total + F.cross_entropy(part[: length - 1].float(), labels[row, 1:length], reduction="sum")
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", **CHATS)
def chat_right(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Trains on responses from their first token on."""
    return _chat_nll(inputs, options)


# The mask of the response starts one token after the prompt's end, so the first token of every
# response is not trained. The author would compare positions with >= in place of >.
# (torchtitan)
@lossgate.candidate("nll", **CHATS)
def first_response_token_untrained(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """The response's first token is taken for prompt."""
    return _chat_nll(inputs, options, bug="first_response_token")


# A trainer that counts its tokens itself, over all data-parallel and context-parallel ranks.

COUNTED: dict[str, Any] = {
    "head": "logprobs",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "exempt": {"microbatches": "it counts the tokens of one call"},
}


def _counted_nll(inputs: NllLogprobs, mesh: DeviceMesh, bug: str | None = None) -> Tensor:
    loss_mask = inputs.mask
    loss_scale = (
        loss_mask.new_tensor(loss_mask.numel(), dtype=torch.float32)
        if bug == "padding_counted"
        else loss_mask.sum().float()
    )
    for axis in ("dp", "cp"):
        dist.all_reduce(loss_scale, group=mesh.get_group(axis))
    token_loss = -inputs.logprobs.float()
    return token_loss[loss_mask].sum() / loss_scale.clamp(min=1)


@lossgate.candidate("nll", **COUNTED)
def counted_right(inputs: NllLogprobs, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Divides by the trained tokens of all ranks."""
    return _counted_nll(inputs, mesh)


# The loss scale is the size of the micro-batches, prompts and padding with them, and not the sum
# of their masks, so losses of batches with much padding are too small. The author would count
# loss_mask.sum(). (prime-rl)
@lossgate.candidate("nll", **COUNTED)
def loss_scale_counts_padding(inputs: NllLogprobs, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Divides by all tokens, those without loss too."""
    return _counted_nll(inputs, mesh, bug="padding_counted")


# Fused label smoothing, which makes the gradients of the head chunk by chunk in forward.

SMOOTHED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"smoothing": lossgate.ANY, "bias": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


class _FusedSmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        mask: Tensor,
        smoothing: float,
        bug: str | None,
    ) -> Tensor:
        loss = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        grad_bias = weight.new_zeros(len(weight))
        for start in range(0, len(hidden), CHUNK):
            chunk = slice(start, start + CHUNK)
            part, own = hidden[chunk], labels[chunk, None]
            logprobs = F.log_softmax(F.linear(part, weight, bias), dim=-1)
            token_loss = -(1 - smoothing) * logprobs.gather(1, own)[:, 0] - smoothing * logprobs.mean(dim=-1)
            loss += torch.where(mask[chunk], token_loss, 0.0).sum()
            dlogits = logprobs.exp() - smoothing / logprobs.shape[-1]
            dlogits.scatter_add_(1, own, torch.full_like(token_loss[:, None], smoothing - 1))
            dlogits.masked_fill_(~mask[chunk, None], 0.0)
            grad_hidden[chunk] = dlogits @ weight
            grad_weight += dlogits.T @ part
            if bug == "bias_of_last_chunk":
                grad_bias = dlogits.sum(dim=0)
            else:
                grad_bias += dlogits.sum(dim=0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.has_bias = bias is not None
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = (grads[0] * grad for grad in ctx.saved_tensors)
        return of_hidden, of_weight, of_bias if ctx.has_bias else None, None, None, None, None


def _fused_smoothed(inputs: LabelSmoothingHidden, options: LabelSmoothingOptions, bug: str | None = None) -> Tensor:
    head = (inputs.hidden, inputs.weight, inputs.bias)
    loss = _FusedSmoothedCrossEntropy.apply(*head, inputs.labels, inputs.mask, options.smoothing, bug)
    return loss / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("label_smoothing", **SMOOTHED)
def fused_smoothed_right(inputs: LabelSmoothingHidden, options: LabelSmoothingOptions, mesh: DeviceMesh) -> Tensor:
    """Adds up the gradients of weight and bias over chunks."""
    return _fused_smoothed(inputs, options)


# The gradient of the bias is assigned in every chunk, while that of the weight is added up, so
# the bias gets the gradient of the last chunk alone. The author would write += there, too.
# (of no one project, after Liger-Kernel)
@lossgate.candidate("label_smoothing", **SMOOTHED)
def bias_grad_of_last_chunk(inputs: LabelSmoothingHidden, options: LabelSmoothingOptions, mesh: DeviceMesh) -> Tensor:
    """Only the last chunk reaches the gradient of the bias."""
    return _fused_smoothed(inputs, options, bug="bias_of_last_chunk")


# An engine that scales the loss before its own backward, so that small gradients survive float16,
# and takes the scale off the gradients afterwards.

SCALED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"reduction": lossgate.ANY, "temperature": lossgate.ANY},
}


class _ScaledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bug: str | None
    ) -> Tensor:
        inner_hidden, inner_weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            logits = F.linear(inner_hidden, inner_weight).float() / temperature
            loss = F.cross_entropy(logits, targets, reduction="sum")
            scaling = hidden.dtype == torch.float16 if bug == "unscaled_loss" else True
            scaled = loss * LOSS_SCALE if scaling else loss
        grads = torch.autograd.grad(scaled, (inner_hidden, inner_weight))
        ctx.save_for_backward(*(grad / LOSS_SCALE for grad in grads))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = (grads[0] * grad for grad in ctx.saved_tensors)
        return of_hidden, of_weight, None, None, None


def _scaled_nll(inputs: NllHidden, options: NllOptions, bug: str | None = None) -> Tensor:
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = _ScaledCrossEntropy.apply(inputs.hidden, inputs.weight, targets, options.temperature, bug)
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", **SCALED)
def scaled_right(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Scales the loss, and takes the scale off its gradients."""
    return _scaled_nll(inputs, options)


# Only float16 has its loss multiplied by the loss scale, but the gradients of all dtypes are
# divided by it. The author would ask for the dtype in both places, or in neither.
# (DeepSpeed)
@lossgate.candidate("nll", **SCALED)
def grads_unscaled_without_scaling(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Gradients are divided by a loss scale that the loss never had."""
    return _scaled_nll(inputs, options, bug="unscaled_loss")


# A vocabulary that tensor-parallel ranks split. Hidden states are the same on all of them.

SPLIT: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp", "tp"),
    "dtypes": ("float32",),
    "supports": {"reduction": lossgate.ANY, "temperature": lossgate.ANY},
}


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.group = group
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad_hidden = grads[0] @ weight
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grads[0].T @ hidden, None


class _Replicate(torch.autograd.Function):
    """Takes an input as invariant over ranks, and uses it on each: gradients are partial sums."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        peak = logits.amax(dim=-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        exps = (logits - peak[:, None]).exp()
        local = labels - first
        mine = (local >= 0) & (local < logits.shape[-1])
        local = torch.where(mine, local, 0)
        own = torch.where(mine, (logits - peak[:, None]).gather(1, local[:, None])[:, 0], 0.0)
        sums = torch.stack((exps.sum(dim=-1), own))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exps / sums[0][:, None], local, mine, mask)
        return torch.where(mask, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probs, local, mine, mask = ctx.saved_tensors
        dlogits = probs.scatter_add(1, local[:, None], -mine[:, None].to(probs.dtype))
        return grads[0] * torch.where(mask[:, None], dlogits, 0.0), None, None, None, None


def _split_nll(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh, bug: str | None = None) -> Tensor:
    group = mesh.get_group("tp")
    hidden = inputs.hidden
    if bug == "reduced_again":
        hidden = _Replicate.apply(hidden, group)
    logits = _ColumnParallelLinear.apply(hidden, inputs.weight, group) / options.temperature
    total = _VocabParallelCrossEntropy.apply(logits, inputs.labels, inputs.mask, inputs.vocab_start, group)
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", **SPLIT)
def split_right(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """Adds up the gradient of the hidden states over tp once, in the backward of the head."""
    return _split_nll(inputs, options, mesh)


# The hidden states are declared invariant over tp, whose gradient is all-reduced, but the head's
# backward has made a whole, replicated one of it already: it grows by the size of tp. The author
# would leave the input declared as replicated. (torchtitan)
@lossgate.candidate("nll", **SPLIT)
def replicated_grad_reduced_again(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """The gradient of the hidden states is added up over tp twice."""
    return _split_nll(inputs, options, mesh, bug="reduced_again")


BUGS = {
    "first_response_token_untrained": ("single",),
    "loss_scale_counts_padding": ("single",),
    "bias_grad_of_last_chunk": ("single",),
    "grads_unscaled_without_scaling": ("single",),
    "replicated_grad_reduced_again": ("tp=2",),
}
RIGHT = ("chat_right", "counted_right", "fused_smoothed_right", "scaled_right", "split_right")
