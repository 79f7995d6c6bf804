# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of distillation, on whole or split vocabularies, after reports of mistakes."""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate

CHUNK = 8
FLOAT32 = ("float32",)
_KINDS = dict.fromkeys(("divergence_type", "beta", "temperature"), lossgate.ANY)


# A fused linear divergence, which makes its gradients in forward, chunk by chunk


class _FusedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, teacher, mask, options, bug):
        total = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        grad_bias = weight.new_zeros(len(weight))
        for start in range(0, len(hidden), CHUNK):
            chunk = slice(start, start + CHUNK)
            kept = mask[chunk, None]
            logits = F.linear(hidden[chunk], weight, bias)
            log_q = (logits / options.temperature).log_softmax(-1)
            log_p = (teacher[chunk] / options.temperature).log_softmax(-1)
            losses, grad = _terms(log_p, log_q, options)
            total += torch.where(kept, losses, 0.0).sum()
            # Back through the log-softmax
            softmax = logits.softmax(-1) if bug == "softmax without temperature" else log_q.exp()
            grad = torch.where(kept, grad - softmax * grad.sum(-1, keepdim=True), 0.0)
            if bug == "bias before temperature":
                grad_bias += grad.sum(0)
                grad = grad / options.temperature
            else:
                grad = grad / options.temperature
                grad_bias += grad.sum(0)
            grad_hidden[chunk] = grad @ weight
            grad_weight += grad.T @ hidden[chunk]
        ctx.save_for_backward(grad_hidden, grad_weight, None if bias is None else grad_bias)
        return total

    @staticmethod
    def backward(ctx, upstream):
        grads = (None if grad is None else grad * upstream for grad in ctx.saved_tensors)
        return *grads, None, None, None, None


def _terms(log_p: Tensor, log_q: Tensor, options: Any) -> tuple[Tensor, Tensor]:
    """Returns the terms of a divergence, and their gradient in the student's log-probabilities."""
    p, q = log_p.exp(), log_q.exp()
    if options.divergence_type == "forward":
        return p * (log_p - log_q), -p
    if options.divergence_type == "reverse":
        return q * (log_q - log_p), q * (log_q - log_p + 1)
    beta = options.beta
    log_r = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    of_student = (1 - beta) * q * (log_q - log_r)
    return beta * p * (log_p - log_r) + of_student, of_student


def _fused(inputs: Any, options: Any, bug: str = "") -> Tensor:
    head = (inputs.hidden, inputs.weight, inputs.bias)
    total = _FusedDivergence.apply(*head, inputs.teacher_logits, inputs.mask, options, bug)
    return total / inputs.valid_tokens.clamp(min=1)


_FUSED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": _KINDS | {"bias": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


@lossgate.candidate("divergence", **_FUSED)
def right_fused_divergence(inputs, options, mesh):
    """Goes back through the log-softmax of tempered logits, and divides all by the temperature."""
    return _fused(inputs, options)


@lossgate.candidate("divergence", **_FUSED)
def log_softmax_slope_without_temperature(inputs, options, mesh):
    """The gradient goes back through the log-softmax with the softmax of logits that are not
    divided by the temperature.
    """
    return _fused(inputs, options, bug="softmax without temperature")


@lossgate.candidate("divergence", **_FUSED)
def bias_gradient_without_temperature(inputs, options, mesh):
    """The gradient of the bias is summed before the gradient of the logits is divided by the
    temperature.
    """
    return _fused(inputs, options, bug="bias before temperature")


# A divergence on packs, whose labels the loss shifts itself


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _packed(inputs: Any, options: Any, bug: str = "") -> Tensor:
    bounds = inputs.cu_seqlens_padded.tolist()
    mask = inputs.mask[0].roll(-1)
    mask[[end - 1 for start, end in pairwise(bounds) if start < end]] = False
    teacher = inputs.teacher_logits[0]
    if bug == "teacher shifted":
        teacher = teacher.roll(-1, 0)
    log_p = (teacher / options.temperature).log_softmax(-1)
    log_q = (inputs.logits.float() / options.temperature).log_softmax(-1)
    if options.divergence_type == "forward":
        losses = _kl(log_p, log_q)
    elif options.divergence_type == "reverse":
        losses = _kl(log_q, log_p)
    else:
        beta = options.beta
        if bug == "mixture of logarithms":
            log_r = torch.lerp(log_q, log_p, beta)
        else:
            log_r = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        losses = beta * _kl(log_p, log_r) + (1 - beta) * _kl(log_q, log_r)
    return torch.where(mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


_PACKED: dict[str, Any] = {
    "head": "logits",
    "tokens": "packed",
    "axes": ("dp",),
    "dtypes": FLOAT32,
    "supports": _KINDS,
}


@lossgate.candidate("divergence", **_PACKED)
def right_packed_divergence(inputs, options, mesh):
    """Shifts the mask alone: both models' logits are at the token that they have read."""
    return _packed(inputs, options)


@lossgate.candidate("divergence", **_PACKED)
def teacher_shifted_like_labels(inputs, options, mesh):
    """The teacher's logits are shifted by one token with the mask, though the student's are not."""
    return _packed(inputs, options, bug="teacher shifted")


@lossgate.candidate("divergence", **_PACKED)
def mixture_of_log_probabilities(inputs, options, mesh):
    """The mixture of the Jensen-Shannon divergence averages log-probabilities, where it should
    average probabilities.
    """
    return _packed(inputs, options, bug="mixture of logarithms")


# The teacher's top-k in a split vocabulary


def _all_reduce(values: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, op=op, group=group)
    return values


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, upstream):
        return _all_reduce(upstream, ctx.group), None


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group):
        return _all_reduce(shard, group)

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def _topk(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    group = mesh.get_group("tp")
    logits = inputs.logits.float() / options.temperature
    width = logits.shape[-1]
    column = inputs.teacher_indices - inputs.vocab_start
    own = (column >= 0) & (column < width)
    chosen = torch.where(own, logits.gather(-1, torch.where(own, column, 0)), 0.0)
    chosen = _SumOverShards.apply(chosen, group)
    teacher = (inputs.teacher_logits / options.temperature).log_softmax(-1)
    if options.zero_outside_topk:
        peak = _all_reduce(logits.detach().amax(-1), group, dist.ReduceOp.MAX)
        lse = _SumOverShards.apply((logits - peak[:, None]).exp().sum(-1), group).log() + peak
        if bug == "normaliser detached":
            lse = lse.detach()
        student = chosen - lse[:, None]
        log_q = logits - _CopyToShards.apply(lse, group)[:, None]
        inside = torch.zeros(len(logits), width + 1, dtype=torch.bool)
        place = column.clamp(0, width - 1) if bug == "clamped" else torch.where(own, column, width)
        inside.scatter_(-1, place, True)
        tail = torch.where(inside[:, :width], 0.0, log_q.exp() * (log_q - options.log_infinitesimal))
        tail = _SumOverShards.apply(tail.sum(-1), group)
    else:
        student, tail = chosen.log_softmax(-1), 0.0
    forward, reverse = _kl(teacher, student), _kl(student, teacher) + tail
    share = {"forward": 1.0, "reverse": 0.0, "mixed": options.mixed_kl_weight}[options.kl_type]
    losses = share * forward + (1 - share) * reverse
    loss = torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)
    tokens = inputs.mask.float().sum()
    if bug == "tokens reduced":
        tokens = _all_reduce(tokens, mesh.get_group("dp"))
    return lossgate.Outputs(loss=loss, metrics={"num_unmasked_tokens": tokens})


_TOPK: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "tp"),
    "dtypes": FLOAT32,
    "supports": dict.fromkeys(
        ("kl_type", "mixed_kl_weight", "temperature", "zero_outside_topk", "log_infinitesimal"), lossgate.ANY
    ),
}


@lossgate.candidate("distill", **_TOPK)
def right_sharded_topk(inputs, options, mesh):
    """Leaves out of the tail those tokens of the top-k that this shard has."""
    return _topk(inputs, options, mesh)


@lossgate.candidate("distill", **_TOPK)
def foreign_tokens_at_the_edge(inputs, options, mesh):
    """Tokens of the top-k that another shard has are clamped to the edge of this one, whose columns
    are then left out of the tail.
    """
    return _topk(inputs, options, mesh, bug="clamped")


@lossgate.candidate("distill", **_TOPK)
def normaliser_without_gradient(inputs, options, mesh):
    """The student's normaliser over the whole vocabulary is computed without a gradient."""
    return _topk(inputs, options, mesh, bug="normaliser detached")


@lossgate.candidate("distill", **_TOPK)
def tokens_summed_over_ranks_twice(inputs, options, mesh):
    """The number of trained tokens is summed over the data-parallel ranks already before the
    trainer sums it.
    """
    return _topk(inputs, options, mesh, bug="tokens reduced")


BUGS = {
    "log_softmax_slope_without_temperature": ("single",),
    "bias_gradient_without_temperature": ("single",),
    "teacher_shifted_like_labels": ("single",),
    "mixture_of_log_probabilities": ("single",),
    "foreign_tokens_at_the_edge": ("tp=2",),
    "normaliser_without_gradient": ("single", "tp=2"),
    "tokens_summed_over_ranks_twice": ("dp=2",),
}
RIGHT = ("right_fused_divergence", "right_packed_divergence", "right_sharded_topk")
