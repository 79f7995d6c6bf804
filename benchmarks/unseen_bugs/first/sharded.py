# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy and log-probabilities over vocabularies that tp splits, right and wrong."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate
from lossgate import Outputs
from lossgate.inputs import LabelSmoothingLogits, NllLogits, SoftcapHidden, TokenLogprobsLogits
from lossgate.options import LabelSmoothingOptions, NllOptions, SoftcapOptions, TokenLogprobsOptions

SPLITS = ("balanced", "even")


def _all_reduce(values: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, op=op, group=group)
    return values


class _CopyToRanks(torch.autograd.Function):
    """The same tensor on all ranks; each adds its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grads[0], ctx.group), None


class _SumOfRanks(torch.autograd.Function):
    """The sum of the ranks' parts; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, reduce_again: bool) -> Tensor:
        ctx.group, ctx.reduce_again = group, reduce_again
        return _all_reduce(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grads[0], ctx.group) if ctx.reduce_again else grads[0], None, None


# One autograd function for log-probabilities and entropies, as post-training frameworks write it.


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        start: int,
        end: int,
        temperature: float,
        group: dist.ProcessGroup,
        bug: str,
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / temperature
        shifted = scaled - _all_reduce(scaled.amax(dim=-1), group, dist.ReduceOp.MAX)[:, None]
        exps = shifted.exp()
        normaliser = _all_reduce(exps.sum(dim=-1), group)

        owned = (labels >= start) & (labels <= end if bug == "end_owned" else labels < end)
        local = (labels - start).clamp(0, logits.shape[-1] - 1)
        target = torch.where(owned, shifted.gather(1, local[:, None])[:, 0], 0.0)
        logprobs = _all_reduce(target, group) - normaliser.log()

        probs = exps / normaliser[:, None]
        finite = torch.where(probs > 0, shifted, 0.0)  # 0 log 0 = 0
        entropy = normaliser.log() - _all_reduce((probs * finite).sum(dim=-1), group)
        ctx.save_for_backward(probs, finite - normaliser.log()[:, None], entropy, owned, local)
        ctx.temperature, ctx.dtype, ctx.bug = temperature, logits.dtype, bug
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        probs, logprobs, entropy, owned, local = ctx.saved_tensors
        grad = -probs * grad_logprobs[:, None]
        grad.scatter_add_(1, local[:, None], (grad_logprobs * owned)[:, None])
        if ctx.bug != "entropy_dropped":
            grad = grad - probs * (logprobs + entropy[:, None]) * grad_entropy[:, None]
        if ctx.bug != "no_temperature":
            grad = grad / ctx.temperature
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _logprobs(inputs: Any, temperature: float, mesh: DeviceMesh, bug: str = "") -> tuple[Tensor, Tensor]:
    shard = (inputs.vocab_start, inputs.vocab_end)
    return _VocabParallelLogprobs.apply(inputs.logits, inputs.labels, *shard, temperature, mesh.get_group("tp"), bug)


PARALLEL: dict[str, Any] = {"head": "logits", "axes": ("dp", "cp", "tp"), "dtypes": ("float32",)}
NLL: dict[str, Any] = PARALLEL | {"supports": {"reduction": lossgate.ANY, "vocab_split": SPLITS}}
TOKENS: dict[str, Any] = PARALLEL | {
    "supports": {"temperature": lossgate.ANY, "vocab_split": SPLITS},
    "differentiable": ("logprobs", "token_entropy"),
}


def _nll(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    logprobs, _ = _logprobs(inputs, 1.0, mesh, bug)
    total = -torch.where(inputs.mask, logprobs, 0.0).sum()
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("nll", **NLL)
def nll_right(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """A label belongs to the rank that has its row."""
    return _nll(inputs, options, mesh)


@lossgate.candidate("nll", **NLL)
def boundary_label_owned_twice(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    """A rank also owns the label one past its last row, so two ranks add a logit for that label."""
    return _nll(inputs, options, mesh, bug="end_owned")


@lossgate.candidate("token_logprobs", **TOKENS)
def tokens_right(inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, mesh: DeviceMesh) -> Outputs:
    """Gives log-probabilities and entropies, and the gradients of both."""
    logprobs, entropy = _logprobs(inputs, options.temperature, mesh)
    return Outputs(logprobs=logprobs, token_entropy=entropy)


@lossgate.candidate("token_logprobs", **TOKENS)
def temperature_not_in_backward(
    inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, mesh: DeviceMesh
) -> Outputs:
    """Backward returns the gradient of the scaled logits, not divided by the temperature."""
    logprobs, entropy = _logprobs(inputs, options.temperature, mesh, bug="no_temperature")
    return Outputs(logprobs=logprobs, token_entropy=entropy)


@lossgate.candidate("token_logprobs", **TOKENS)
def entropy_gradient_dropped(inputs: TokenLogprobsLogits, options: TokenLogprobsOptions, mesh: DeviceMesh) -> Outputs:
    """Backward uses the gradient of the log-probabilities and ignores that of the entropies."""
    logprobs, entropy = _logprobs(inputs, options.temperature, mesh, bug="entropy_dropped")
    return Outputs(logprobs=logprobs, token_entropy=entropy)


# Label smoothing, with a small autograd function for each collective.

SMOOTHED: dict[str, Any] = PARALLEL | {"supports": {"smoothing": lossgate.ANY, "vocab_split": SPLITS}}


def _smoothed(inputs: LabelSmoothingLogits, options: LabelSmoothingOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")
    logits = inputs.logits.float()
    shift = _all_reduce(logits.detach().amax(dim=-1), group, dist.ReduceOp.MAX)
    shifted = logits - shift[:, None]
    lse = _SumOfRanks.apply(shifted.exp().sum(dim=-1), group, False).log()

    owned = (inputs.labels >= inputs.vocab_start) & (inputs.labels < inputs.vocab_end)
    local = torch.where(owned, inputs.labels - inputs.vocab_start, 0)
    target = torch.where(owned, shifted.gather(1, local[:, None])[:, 0], 0.0)
    target = _SumOfRanks.apply(target, group, False)
    mean = _SumOfRanks.apply(shifted.sum(dim=-1), group, bug == "reduced_again") / inputs.vocab_size

    losses = lse - (1 - options.smoothing) * target - options.smoothing * mean
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("label_smoothing", **SMOOTHED)
def parallel_smoothed_right(inputs: LabelSmoothingLogits, options: LabelSmoothingOptions, mesh: DeviceMesh) -> Tensor:
    """Passes the gradient of each sum over ranks on as it is."""
    return _smoothed(inputs, options, mesh)


@lossgate.candidate("label_smoothing", **SMOOTHED)
def smoothing_gradient_reduced_again(
    inputs: LabelSmoothingLogits, options: LabelSmoothingOptions, mesh: DeviceMesh
) -> Tensor:
    """The gradient of the sum of logits is equal on all ranks, and is summed over them again."""
    return _smoothed(inputs, options, mesh, bug="reduced_again")


# A column-parallel head with a soft-cap.

HEAD: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "cp", "tp"),
    "dtypes": ("float32",),
    "supports": {"softcap": lossgate.ANY, "bias": lossgate.ANY, "vocab_split": SPLITS},
}


def _softcapped(inputs: SoftcapHidden, options: SoftcapOptions, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")
    hidden = inputs.hidden if bug == "hidden_partial" else _CopyToRanks.apply(inputs.hidden, group)
    logits = torch.nn.functional.linear(hidden, inputs.weight, inputs.bias).float()
    logits = options.softcap * torch.tanh(logits / options.softcap)
    shift = _all_reduce(logits.detach().amax(dim=-1), group, dist.ReduceOp.MAX)
    shifted = logits - shift[:, None]
    lse = _SumOfRanks.apply(shifted.exp().sum(dim=-1), group, False).log()
    owned = (inputs.labels >= inputs.vocab_start) & (inputs.labels < inputs.vocab_end)
    local = torch.where(owned, inputs.labels - inputs.vocab_start, 0)
    target = torch.where(owned, shifted.gather(1, local[:, None])[:, 0], 0.0)
    losses = lse - _SumOfRanks.apply(target, group, False)
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


@lossgate.candidate("softcap", **HEAD)
def softcap_head_right(inputs: SoftcapHidden, options: SoftcapOptions, mesh: DeviceMesh) -> Tensor:
    """Sums the gradient of the hidden states over the ranks of the vocabulary."""
    return _softcapped(inputs, options, mesh)


@lossgate.candidate("softcap", **HEAD)
def hidden_gradient_not_reduced(inputs: SoftcapHidden, options: SoftcapOptions, mesh: DeviceMesh) -> Tensor:
    """Hidden states get the gradient of this rank's rows of the vocabulary alone."""
    return _softcapped(inputs, options, mesh, bug="hidden_partial")


BUGS = {
    "boundary_label_owned_twice": ("tp=2",),
    "temperature_not_in_backward": ("tp=2", "single"),
    "entropy_gradient_dropped": ("tp=2", "single"),
    "smoothing_gradient_reduced_again": ("tp=2",),
    "hidden_gradient_not_reduced": ("tp=2", "dp=2,tp=2"),
}
RIGHT = ("nll_right", "tokens_right", "parallel_smoothed_right", "softcap_head_right")
