# SPDX-License-Identifier: Apache-2.0
"""Wrong cross-entropies whose vocabulary is split over tensor-parallel ranks, recreated from
public reports."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate

FLOAT32 = ("float32",)


def _mean(losses: Tensor, inputs: Any) -> Tensor:
    return torch.where(inputs.mask, losses, 0.0).sum() / inputs.valid_tokens.clamp(min=1)


# A cross-entropy with a backward of its own, as in Megatron-LM


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, start, group, bug):
        peak = logits.amax(-1)
        if bug != "local maximum":
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        logits = logits - peak[:, None]
        elsewhere = (labels < start) | (labels >= start + logits.shape[-1])
        column = (labels - start).masked_fill(elsewhere, 0)
        row = torch.arange(len(labels))
        predicted = logits[row, column].masked_fill(elsewhere, 0.0)
        dist.all_reduce(predicted, group=group)
        exponentials = logits.exp()
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exponentials / total[:, None], elsewhere, column)
        return total.log() - predicted

    @staticmethod
    def backward(ctx, upstream):
        softmax, elsewhere, column = ctx.saved_tensors
        gradient = softmax.clone()
        gradient[torch.arange(len(column)), column] -= (~elsewhere).to(gradient.dtype)
        return gradient * upstream[:, None], None, None, None, None


def _megatron(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")
    if bug == "default group" and group.size() > 1:
        group = None
    logits = inputs.logits.float() / options.temperature
    local = bug if bug == "local maximum" else ""
    return _mean(_VocabParallelCrossEntropy.apply(logits, inputs.labels, inputs.vocab_start, group, local), inputs)


@lossgate.candidate("nll", head="logits", axes=("cp", "tp"), dtypes=FLOAT32, supports={"temperature": lossgate.ANY})
def right_vocab_parallel(inputs, options, mesh):
    """Reduces maximum, label's logit and sum over the tensor-parallel group."""
    return _megatron(inputs, options, mesh)


@lossgate.candidate("nll", head="logits", axes=("cp", "tp"), dtypes=FLOAT32, supports={"temperature": lossgate.ANY})
def shift_by_local_maximum(inputs, options, mesh):
    """Each rank subtracts the largest logit of its own shard, and then sums of different shifts
    are added up.
    """
    return _megatron(inputs, options, mesh, bug="local maximum")


@lossgate.candidate("nll", head="logits", axes=("cp", "tp"), dtypes=FLOAT32, supports={"temperature": lossgate.ANY})
def softmax_over_default_group(inputs, options, mesh):
    """The softmax is reduced over the default group, which also holds context-parallel ranks
    with other tokens.
    """
    return _megatron(inputs, options, mesh, bug="default group")


# Log-probabilities by autograd, with sums over shards whose backward is the identity


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group):
        total = shard.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def _by_autograd(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    group = mesh.get_group("tp")
    logits = inputs.logits.float()[:, : inputs.vocab_end - inputs.vocab_start] / options.temperature
    peak = torch.cat([logits.detach(), logits.new_full((len(logits), 1), -1e30)], dim=1).amax(-1)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    lse = _SumOverShards.apply((logits - peak[:, None]).exp().sum(-1), group).log() + peak
    own = (inputs.labels >= inputs.vocab_start) & (inputs.labels < inputs.vocab_end)
    logits = torch.nn.functional.pad(logits, (0, 1))  # A shard may be empty.
    label = logits.gather(-1, (inputs.labels - inputs.vocab_start).masked_fill(~own, 0)[:, None])[:, 0]
    if bug == "owner alone":
        logprobs = _SumOverShards.apply(torch.where(own, label - lse, 0.0), group)
    else:
        logprobs = _SumOverShards.apply(torch.where(own, label, 0.0), group) - lse
    return lossgate.Outputs(logprobs=logprobs)


@lossgate.candidate(
    "token_logprobs",
    head="logits",
    axes=("dp", "tp"),
    dtypes=FLOAT32,
    supports={"temperature": lossgate.ANY, "vocab_split": lossgate.ANY},
)
def right_sum_over_shards(inputs, options, mesh):
    """Sums the label's logit over the shards, and subtracts the normaliser on all of them."""
    return _by_autograd(inputs, options, mesh)


@lossgate.candidate(
    "token_logprobs",
    head="logits",
    axes=("dp", "tp"),
    dtypes=FLOAT32,
    supports={"temperature": lossgate.ANY, "vocab_split": lossgate.ANY},
)
def normaliser_gradient_of_owner_alone(inputs, options, mesh):
    """The log-probability is masked before it is summed over shards, so shards without the
    label get no gradient.
    """
    return _by_autograd(inputs, options, mesh, bug="owner alone")


# Label smoothing from hidden states


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, upstream):
        total = upstream.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, start, vocab_size, smoothing, group, bug):
        peak = logits.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        own = (labels >= start) & (labels < start + logits.shape[-1])
        column = torch.where(own, labels - start, 0)
        shifted = logits - peak[:, None]
        label = torch.where(own, shifted[torch.arange(len(labels)), column], 0.0)
        sums = torch.stack([label, shifted.exp().sum(-1), shifted.sum(-1)])
        dist.all_reduce(sums, group=group)
        label, total, everything = sums
        ctx.save_for_backward(shifted.exp() / total[:, None], own, column)
        ctx.smoothing = smoothing
        ctx.share = smoothing / (logits.shape[-1] if bug == "columns of the shard" else vocab_size)
        return total.log() - (1 - smoothing) * label - smoothing * everything / vocab_size

    @staticmethod
    def backward(ctx, upstream):
        softmax, own, column = ctx.saved_tensors
        gradient = softmax - ctx.share
        gradient[torch.arange(len(column)), column] -= torch.where(own, 1 - ctx.smoothing, 0.0)
        return gradient * upstream[:, None], *(None,) * 6


def _smoothed(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")
    logits = _CopyToShards.apply(inputs.hidden, group).float() @ inputs.weight.float().T
    if inputs.bias is not None:
        logits = logits + inputs.bias.float()
    losses = _SmoothedCrossEntropy.apply(
        logits, inputs.labels, inputs.vocab_start, inputs.vocab_size, options.smoothing, group, bug
    )
    return _mean(losses, inputs)


@lossgate.candidate(
    "label_smoothing",
    head="hidden",
    axes=("dp", "tp"),
    dtypes=FLOAT32,
    supports={"smoothing": lossgate.ANY, "bias": lossgate.ANY},
)
def right_smoothing(inputs, options, mesh):
    """Shares the smoothing among the whole vocabulary, in forward and in backward."""
    return _smoothed(inputs, options, mesh)


@lossgate.candidate(
    "label_smoothing",
    head="hidden",
    axes=("dp", "tp"),
    dtypes=FLOAT32,
    supports={"smoothing": lossgate.ANY, "bias": lossgate.ANY},
)
def smoothing_gradient_by_shard_width(inputs, options, mesh):
    """Backward shares the smoothing among the columns of the shard, where forward has the whole
    vocabulary.

    A size that is that of the wrong part of the ranks.
    """
    return _smoothed(inputs, options, mesh, bug="columns of the shard")


BUGS = {
    "shift_by_local_maximum": ("tp=2",),
    "softmax_over_default_group": ("cp=2,tp=2",),
    "normaliser_gradient_of_owner_alone": ("tp=2", "dp=2,tp=2"),
    "smoothing_gradient_by_shard_width": ("tp=2", "dp=2,tp=2"),
}
RIGHT = ("right_vocab_parallel", "right_sum_over_shards", "right_smoothing")
