# SPDX-License-Identifier: Apache-2.0
"""Distillation: divergences over a split vocabulary, and a teacher's top-k, right and wrong."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate import Contract
from lossgate.inputs import DistillHidden, DistillLogits, DivergenceLogits
from lossgate.options import DistillOptions, DivergenceOptions

CHUNK = 16


def _all_reduce(values: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, op=op, group=group)
    return values


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grads[0], ctx.group), None


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


# The teacher's whole vocabulary, split over tensor-parallel ranks.

VOCABULARY: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp", "cp", "tp"),
    "dtypes": ("float32",),
    "supports": {
        "divergence_type": lossgate.ANY,
        "beta": lossgate.ANY,
        "temperature": lossgate.ANY,
        "vocab_split": ("balanced", "even"),
    },
}


def _log_softmax(logits: Tensor, group: dist.ProcessGroup, bug: str = "") -> Tensor:
    shifted = logits - _all_reduce(logits.detach().amax(dim=-1), group, dist.ReduceOp.MAX)[:, None]
    normaliser = _SumOfRanks.apply(shifted.exp().sum(dim=-1), group)
    if bug != "own_mass":
        normaliser = _CopyToRanks.apply(normaliser, group)
    return shifted - normaliser.log()[:, None]


def _divergence(inputs: DivergenceLogits, options: DivergenceOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")
    log_q = _log_softmax(inputs.logits.float() / options.temperature, group, bug)
    log_p = _log_softmax(inputs.teacher_logits / options.temperature, group)
    if options.divergence_type == "forward":
        terms = log_p.exp() * (log_p - log_q)
    elif options.divergence_type == "reverse":
        terms = log_q.exp() * (log_q - log_p)
    else:
        beta = options.beta
        log_r = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        of_teacher = log_p.exp() * (log_p - log_r)
        of_student = log_q.exp() * (log_q - log_r)
        if bug == "weights_swapped":
            terms = torch.lerp(of_teacher, of_student, beta)
        else:
            terms = torch.lerp(of_student, of_teacher, beta)
    divergences = _SumOfRanks.apply(terms.sum(dim=-1), group)
    return torch.where(inputs.mask, divergences, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("divergence", **VOCABULARY)
def divergence_right(inputs: DivergenceLogits, options: DivergenceOptions, mesh: DeviceMesh) -> Tensor:
    """Sums the normaliser's gradient over the ranks that use it."""
    return _divergence(inputs, options, mesh)


@lossgate.candidate("divergence", **VOCABULARY)
def jsd_weights_swapped(inputs: DivergenceLogits, options: DivergenceOptions, mesh: DeviceMesh) -> Tensor:
    """The Jensen-Shannon divergence swaps the weights of the student's half and the teacher's."""
    return _divergence(inputs, options, mesh, bug="weights_swapped")


@lossgate.candidate("divergence", **VOCABULARY)
def backward_takes_own_mass_for_whole(inputs: DivergenceLogits, options: DivergenceOptions, mesh: DeviceMesh) -> Tensor:
    """The normaliser's gradient is that of this rank's terms, taken for those of all ranks."""
    return _divergence(inputs, options, mesh, bug="own_mass")


# The teacher's top-k.


def _topk_kl(student: Tensor, teacher: Tensor, options: DistillOptions) -> Tensor:
    log_q = (student.float() / options.temperature).log_softmax(dim=-1)
    log_p = (teacher / options.temperature).log_softmax(dim=-1)
    forward = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    reverse = (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    share = {"forward": 1.0, "reverse": 0.0, "mixed": options.mixed_kl_weight}[options.kl_type]
    return share * forward + (1 - share) * reverse


TOPK = dict.fromkeys(("kl_type", "mixed_kl_weight", "temperature", "epsilon"), lossgate.ANY)

# From hidden states, chunk by chunk.

CHUNKED: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp"),
    "dtypes": ("float32",),
    "supports": TOPK | {"bias": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


def _chunked(inputs: DistillHidden, options: DistillOptions, bug: str = "") -> Tensor:
    total = inputs.hidden[:0].sum() + inputs.weight[:0].sum()
    if inputs.bias is not None:
        total = total + inputs.bias[:0].sum()
    for start in range(0, len(inputs.hidden), CHUNK):
        chunk = slice(start, start + CHUNK)
        logits = torch.nn.functional.linear(inputs.hidden[chunk], inputs.weight, inputs.bias)
        kl = _topk_kl(logits.gather(1, inputs.teacher_indices[chunk]), inputs.teacher_logits[chunk], options)
        mask = inputs.mask[: len(kl)] if bug == "first_mask" else inputs.mask[chunk]
        total = total + torch.where(mask, kl, 0.0).sum()
    count = inputs.valid_tokens.float() + options.epsilon
    return total / torch.where(count > 0, count, 1.0)


@lossgate.candidate("distill", **CHUNKED)
def topk_chunked_right(inputs: DistillHidden, options: DistillOptions, mesh: DeviceMesh) -> Tensor:
    """Takes each chunk's own part of the mask."""
    return _chunked(inputs, options)


@lossgate.candidate("distill", **CHUNKED)
def mask_of_first_chunk(inputs: DistillHidden, options: DistillOptions, mesh: DeviceMesh) -> Tensor:
    """Every chunk of tokens is masked by the mask of the first."""
    return _chunked(inputs, options, bug="first_mask")


# From logits, in a trainer that averages over data-parallel ranks.

AVERAGE = {"dp": "avg"}
AVERAGED: dict[str, Any] = {
    "head": "logits",
    "axes": ("dp",),
    "dtypes": ("float32",),
    "supports": TOPK,
    "contract": Contract(loss=AVERAGE, grads={"logits": AVERAGE}),
}


def _averaged(inputs: DistillLogits, options: DistillOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    kl = _topk_kl(inputs.logits.gather(1, inputs.teacher_indices), inputs.teacher_logits, options)
    total = torch.where(inputs.mask, kl, 0.0).sum()
    ranks = mesh.get_group("dp").size()
    count = inputs.mask.sum() * ranks if bug == "local_mean" else inputs.valid_tokens
    count = count.float() + options.epsilon
    return total * ranks / torch.where(count > 0, count, 1.0)


@lossgate.candidate("distill", **AVERAGED)
def topk_averaged_right(inputs: DistillLogits, options: DistillOptions, mesh: DeviceMesh) -> Tensor:
    """Divides by the tokens of the whole batch."""
    return _averaged(inputs, options, mesh)


@lossgate.candidate("distill", **AVERAGED)
def mean_of_rank_means(inputs: DistillLogits, options: DistillOptions, mesh: DeviceMesh) -> Tensor:
    """Each data-parallel rank divides by its own trained tokens before the average over ranks."""
    return _averaged(inputs, options, mesh, bug="local_mean")


BUGS = {
    "jsd_weights_swapped": ("tp=2", "single"),
    "backward_takes_own_mass_for_whole": ("tp=2",),
    "mask_of_first_chunk": ("single",),
    "mean_of_rank_means": ("dp=2",),
}
RIGHT = ("divergence_right", "topk_chunked_right", "topk_averaged_right")
