# SPDX-License-Identifier: Apache-2.0
"""Fused heads, log-probabilities and distillation in chunks, right and wrong."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate.inputs import DivergenceHidden, NllHidden, TokenLogprobsLogits
from lossgate.options import DivergenceOptions, NllOptions, TokenLogprobsOptions

CHUNK = 8

# A head that keeps no logits: its backward makes those of each chunk again.

RECOMPUTED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"reduction": lossgate.ANY, "temperature": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


def _chunk_loss(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = F.linear(hidden, weight).float() / temperature
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


class _RecomputedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bug: str | None
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.bug = temperature, bug
        chunks = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        losses = [_chunk_loss(part, weight, own, temperature) for part, own in chunks]
        return sum(losses, hidden.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        if ctx.bug != "weight_in_inner_graph":
            weight = weight.detach().requires_grad_()
        grad_hidden = []
        for part, own in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            inner = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = _chunk_loss(inner, weight, own, ctx.temperature)
            torch.autograd.backward(loss, grads[0])
            grad_hidden.append(inner.grad)
        of_hidden = torch.cat(grad_hidden) if grad_hidden else torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if weight.grad is None else weight.grad
        return of_hidden, of_weight, None, None, None


def _recomputed_nll(inputs: NllHidden, options: NllOptions, bug: str | None = None) -> Tensor:
    targets = inputs.labels.masked_fill(~inputs.mask, -100)
    total = _RecomputedHead.apply(inputs.hidden, inputs.weight, targets, options.temperature, bug)
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", **RECOMPUTED)
def recomputed_right(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """The inner backward writes to copies of the head."""
    return _recomputed_nll(inputs, options)


# The inner backward runs on the head's weight itself, so it writes to the parameter's .grad, and
# what backward returns is added to that once more. The author would detach the weight first, or
# take its gradient by torch.autograd.grad. (unsloth-zoo)
@lossgate.candidate("nll", **RECOMPUTED)
def weight_grad_written_and_returned(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """The gradient of the weight counts twice."""
    return _recomputed_nll(inputs, options, bug="weight_in_inner_graph")


# Log-probabilities of a rollout, with its temperature.

SCORED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"temperature": lossgate.ANY},
}


def _selective_log_softmax(inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, bug: str | None = None) -> Any:
    logits = inputs.logits.float()
    if bug == "scaled_after_softmax":
        logprobs = torch.log_softmax(logits, dim=-1) / options.temperature
    else:
        logprobs = torch.log_softmax(logits / options.temperature, dim=-1)
    return lossgate.Outputs(logprobs=logprobs.gather(-1, inputs.labels[:, None])[:, 0])


@lossgate.candidate("token_logprobs", **SCORED)
def scored_right(inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, mesh: DeviceMesh) -> lossgate.Outputs:
    """Divides the logits by the temperature."""
    return _selective_log_softmax(inputs, options)


# The temperature divides log-probabilities, after the softmax, so they no longer belong to a
# distribution that sums to one. The author would divide the logits before log_softmax.
# (prime-rl)
@lossgate.candidate("token_logprobs", **SCORED)
def temperature_after_log_softmax(
    inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, mesh: DeviceMesh
) -> lossgate.Outputs:
    """Divides log-probabilities by the temperature, in place of logits."""
    return _selective_log_softmax(inputs, options, bug="scaled_after_softmax")


# Distillation from a whole teacher, in chunks of tokens.

DISTILLED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": {"divergence_type": ("forward", "reverse"), "temperature": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


def _chunk_divergence(
    hidden: Tensor, weight: Tensor, teacher_logits: Tensor, mask: Tensor, options: DivergenceOptions
) -> Tensor:
    student = F.log_softmax(F.linear(hidden, weight).float() / options.temperature, dim=-1)
    teacher = F.log_softmax(teacher_logits.float() / options.temperature, dim=-1)
    source, other = (teacher, student) if options.divergence_type == "forward" else (student, teacher)
    token_loss = (source.exp() * (source - other)).sum(dim=-1)
    return torch.where(mask, token_loss, 0.0).sum()


def _spans(tokens: int, bug: str | None) -> list[slice]:
    starts = range(0, tokens, CHUNK)
    if bug == "tail_overlaps" and tokens >= CHUNK:
        # Every chunk has the full size, for which the kernel is compiled.
        return [slice(min(start, tokens - CHUNK), min(start, tokens - CHUNK) + CHUNK) for start in starts]
    return [slice(start, start + CHUNK) for start in starts]


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_logits: Tensor,
        mask: Tensor,
        options: DivergenceOptions,
        bug: str | None,
    ) -> Tensor:
        loss = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for span in _spans(len(hidden), bug):
            part, head = hidden[span].detach().requires_grad_(), weight.detach().requires_grad_()
            with torch.enable_grad():
                of_chunk = _chunk_divergence(part, head, teacher_logits[span], mask[span], options)
            of_part, of_head = torch.autograd.grad(of_chunk, (part, head))
            loss += of_chunk.detach()
            grad_hidden[span] += of_part
            grad_weight += of_head
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = (grads[0] * grad for grad in ctx.saved_tensors)
        return of_hidden, of_weight, None, None, None, None


def _distilled(inputs: DivergenceHidden, options: DivergenceOptions, bug: str | None = None) -> Tensor:
    given = (inputs.hidden, inputs.weight, inputs.teacher_logits, inputs.mask, options, bug)
    return _ChunkedDistillation.apply(*given) / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("divergence", **DISTILLED)
def distilled_right(inputs: DivergenceHidden, options: DivergenceOptions, mesh: DeviceMesh) -> Tensor:
    """The last chunk may be short."""
    return _distilled(inputs, options)


# The start of the last chunk is clamped so that it is full, and it adds tokens again that the chunk
# before it had: to the loss and to both gradients. The author would mask those tokens, or take a
# short chunk. (of no one project)
@lossgate.candidate("divergence", **DISTILLED)
def last_chunk_reads_overlap(inputs: DivergenceHidden, options: DivergenceOptions, mesh: DeviceMesh) -> Tensor:
    """Tokens before a short last chunk count twice."""
    return _distilled(inputs, options, bug="tail_overlaps")


BUGS = {
    "weight_grad_written_and_returned": ("single",),
    "temperature_after_log_softmax": ("single",),
    "last_chunk_reads_overlap": ("single",),
}
RIGHT = ("recomputed_right", "scored_right", "distilled_right")
