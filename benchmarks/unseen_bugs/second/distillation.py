# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of distillation, on a whole or split vocabulary, from public reports."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import lossgate

FLOAT32 = ("float32",)


def _sum(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _log_softmax(logits: Tensor, group: Any) -> Tensor:
    """Returns this rank's columns of the log-softmax over the whole vocabulary."""
    peak = logits.amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak[:, None]
    return shifted - _sum(shifted.exp().sum(-1), group).log()[:, None]


class _VocabParallelDivergence(torch.autograd.Function):
    """Computes the mean divergence of trained tokens, with a backward of its own."""

    @staticmethod
    def forward(ctx, student, teacher, mask, count, options, group, bug):
        log_q = _log_softmax(student.float() / options.temperature, group)
        log_p = _log_softmax(teacher / options.temperature, group)
        p, q = log_p.exp(), log_q.exp()
        if options.divergence_type == "forward":
            losses = _sum((p * (log_p - log_q)).sum(-1), group)
            gradient = q - p
        elif options.divergence_type == "reverse":
            losses = _sum((q * (log_q - log_p)).sum(-1), group)
            gradient = q * (log_q - log_p - losses[:, None])
        else:
            beta = options.beta
            log_r = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
            of_student = (q * (log_q - log_r)).sum(-1)
            if bug == "student term of the shard":
                gradient = (1 - beta) * q * (log_q - log_r - of_student[:, None])
                of_student = _sum(of_student, group)
            else:
                of_student = _sum(of_student, group)
                gradient = (1 - beta) * q * (log_q - log_r - of_student[:, None])
            losses = beta * _sum((p * (log_p - log_r)).sum(-1), group) + (1 - beta) * of_student
        divisor = max(len(mask), 1) if bug == "batch mean" else count
        ctx.save_for_backward(torch.where(mask[:, None], gradient, 0.0) / options.temperature / divisor)
        ctx.dtype = student.dtype
        return torch.where(mask, losses, 0.0).sum() / count

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(ctx.dtype), *(None,) * 6


def _divergence(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    count = inputs.valid_tokens.clamp(min=1)
    group = mesh.get_group("tp")
    return _VocabParallelDivergence.apply(inputs.logits, inputs.teacher_logits, inputs.mask, count, options, group, bug)


_DIVERGENCE = dict.fromkeys(("divergence_type", "beta", "temperature"), lossgate.ANY)


@lossgate.candidate("divergence", head="logits", axes=("dp", "cp", "tp"), dtypes=FLOAT32, supports=_DIVERGENCE)
def right_divergence(inputs, options, mesh):
    """Reduces every sum over the vocabulary, and divides loss and gradient by the same count."""
    return _divergence(inputs, options, mesh)


@lossgate.candidate("divergence", head="logits", axes=("dp", "cp", "tp"), dtypes=FLOAT32, supports=_DIVERGENCE)
def jsd_gradient_with_sum_of_shard(inputs, options, mesh):
    """The gradient of the Jensen-Shannon divergence subtracts a student's term of one shard alone.

    A missing reduction over the shards.
    """
    return _divergence(inputs, options, mesh, bug="student term of the shard")


@lossgate.candidate("divergence", head="logits", axes=("dp", "cp", "tp"), dtypes=FLOAT32, supports=_DIVERGENCE)
def divergence_gradient_of_batch_mean(inputs, options, mesh):
    """The gradient is divided by all rows of a rank, and the loss by the batch's trained tokens."""
    return _divergence(inputs, options, mesh, bug="batch mean")


# The teacher's top-k


class _SumOverShards(torch.autograd.Function):
    """Adds up shards, on all of which the sum is used in the same way."""

    @staticmethod
    def forward(ctx, shard, group):
        return _sum(shard, group)

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def _kl_div(log_input: Tensor, log_target: Tensor) -> Tensor:
    return F.kl_div(log_input, log_target, reduction="none", log_target=True).sum(-1)


def _topk(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")
    indices, teacher = inputs.teacher_indices, inputs.teacher_logits
    if group.size() > 1:
        own = (indices >= inputs.vocab_start) & (indices < inputs.vocab_end)
        student = inputs.hidden.float() @ inputs.weight.float().T
        student = torch.where(own, student.gather(-1, torch.where(own, indices - inputs.vocab_start, 0)), 0.0)
        student = _SumOverShards.apply(student, group) / options.temperature
        if bug != "temperature of the student":
            teacher = teacher / options.temperature
    else:
        student = (inputs.hidden.float() @ inputs.weight.float().T).gather(-1, indices) / options.temperature
        teacher = teacher / options.temperature
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    if options.kl_type == "forward":
        losses = _kl_div(log_q, log_p)
    elif options.kl_type == "reverse":
        losses = _kl_div(log_p, log_q)
    else:
        reverse = _kl_div(log_q, log_p) if bug == "arguments" else _kl_div(log_p, log_q)
        losses = options.mixed_kl_weight * _kl_div(log_q, log_p) + (1 - options.mixed_kl_weight) * reverse
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


_TOPK = dict.fromkeys(("kl_type", "mixed_kl_weight", "temperature"), lossgate.ANY)
_PARTIAL = lossgate.Contract(grads={"hidden": {"tp": "sum"}})


@lossgate.candidate("distill", head="hidden", axes=("dp", "tp"), dtypes=FLOAT32, supports=_TOPK, contract=_PARTIAL)
def right_topk_distillation(inputs, options, mesh):
    """Divides both models' logits by the temperature, on one shard or on several."""
    return _topk(inputs, options, mesh)


@lossgate.candidate("distill", head="hidden", axes=("dp", "tp"), dtypes=FLOAT32, supports=_TOPK, contract=_PARTIAL)
def sharded_teacher_without_temperature(inputs, options, mesh):
    """On split vocabularies the temperature divides the student's logits, and not the teacher's."""
    return _topk(inputs, options, mesh, bug="temperature of the student")


@lossgate.candidate("distill", head="hidden", axes=("dp", "tp"), dtypes=FLOAT32, supports=_TOPK, contract=_PARTIAL)
def mixed_kl_with_forward_twice(inputs, options, mesh):
    """The reverse divergence in the mixed loss has the arguments of the forward one."""
    return _topk(inputs, options, mesh, bug="arguments")


BUGS = {
    "jsd_gradient_with_sum_of_shard": ("tp=2", "dp=2,tp=2"),
    "divergence_gradient_of_batch_mean": ("dp=2", "cp=2"),
    "sharded_teacher_without_temperature": ("tp=2",),
    "mixed_kl_with_forward_twice": ("single", "tp=2"),
}
RIGHT = ("right_divergence", "right_topk_distillation")
