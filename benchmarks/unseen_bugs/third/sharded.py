# SPDX-License-Identifier: Apache-2.0
"""Wrong kernels whose vocabulary or sequences are split over ranks, after reports of mistakes."""

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


def _all_reduce(values: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, op=op, group=group)
    return values


def _total(losses: Tensor, inputs: Any) -> Tensor:
    return torch.where(inputs.mask, losses, 0.0).sum()


def _mean(losses: Tensor, inputs: Any) -> Tensor:
    return _total(losses, inputs) / inputs.valid_tokens.clamp(min=1)


# A cross-entropy that saves its softmax for backward, and reports the largest logits


class _ShardedCrossEntropy(torch.autograd.Function):
    """Gives the cross-entropy and the logarithm of the normaliser, both differentiable."""

    @staticmethod
    def forward(ctx, logits, labels, start, end, group, bug):
        if bug == "own width":
            start, end = group.rank() * (end - start), (group.rank() + 1) * (end - start)
        if bug != "padding":
            logits = logits.masked_fill(torch.arange(logits.shape[-1]) >= end - start, -torch.inf)
        logits = F.pad(logits, (0, 1), value=-torch.inf)  # A shard may be empty.
        peak = _all_reduce(logits.amax(-1).clamp(min=-1e30), group, dist.ReduceOp.MAX)
        shifted = logits - peak[:, None]
        exponentials = shifted.exp()
        total = _all_reduce(exponentials.sum(-1), group)
        own = (labels >= start) & (labels < end)
        column = torch.where(own, labels - start, 0)
        label = torch.where(own, shifted.gather(-1, column[:, None])[:, 0], 0.0)
        label = _all_reduce(label, group)
        softmax = exponentials / total[:, None]
        ctx.save_for_backward(softmax.bfloat16() if bug == "softmax in bfloat16" else softmax, own, column)
        lse = total.log() if bug == "shifted" else total.log() + peak
        return total.log() - label, lse

    @staticmethod
    def backward(ctx, upstream, upstream_lse):
        softmax, own, column = ctx.saved_tensors
        grad = softmax.float() * (upstream + upstream_lse)[:, None]
        grad[torch.arange(len(column)), column] -= torch.where(own, upstream, 0.0)
        return grad[:, :-1], None, None, None, None, None


def _sharded(inputs: Any, mesh: DeviceMesh, bug: str = "") -> tuple[Tensor, Tensor]:
    shard = (inputs.vocab_start, inputs.vocab_end)
    return _ShardedCrossEntropy.apply(inputs.logits.float(), inputs.labels, *shard, mesh.get_group("tp"), bug)


def _reported(inputs: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    losses, _ = _sharded(inputs, mesh, bug)
    with torch.no_grad():
        columns = inputs.vocab_end - inputs.vocab_start
        logits = F.pad(inputs.logits[:, :columns].float(), (0, 1), value=-1e30)
        largest = logits.amax(-1)
        if bug != "largest of the shard":
            largest = _all_reduce(largest, mesh.get_group("tp"), dist.ReduceOp.MAX)
        average = torch.where(inputs.real, largest, 0.0).sum() / inputs.real_tokens.clamp(min=1)
    return lossgate.Outputs(loss=_mean(losses, inputs), metrics={"vocab_max_logits_avg": average})


_LOGITS: dict[str, Any] = {"head": "logits", "axes": ("dp", "tp"), "dtypes": FLOAT32}
_SPLIT = {"vocab_split": lossgate.ANY}


@lossgate.candidate("nll", supports=_SPLIT, **_LOGITS)
def right_reported(inputs, options, mesh):
    """Leaves padding columns out, and takes the largest logit over all shards."""
    return _reported(inputs, mesh)


@lossgate.candidate("nll", supports=_SPLIT, **_LOGITS)
def padding_columns_in_softmax(inputs, options, mesh):
    """The columns that pad a shard to the width of the others take part in the softmax."""
    return _reported(inputs, mesh, bug="padding")


@lossgate.candidate("nll", **_LOGITS)
def start_by_own_width(inputs, options, mesh):
    """The first column of a shard is computed as the rank times the width of its own shard, though
    shards can differ in width.
    """
    return _reported(inputs, mesh, bug="own width")


@lossgate.candidate("nll", **_LOGITS)
def softmax_saved_in_bfloat16(inputs, options, mesh):
    """To save memory the softmax is kept for backward in bfloat16, where float32 is declared."""
    return _reported(inputs, mesh, bug="softmax in bfloat16")


@lossgate.candidate("nll", **_LOGITS)
def largest_logit_of_shard(inputs, options, mesh):
    """The reported largest logit is that of the rank's shard of the vocabulary."""
    return _reported(inputs, mesh, bug="largest of the shard")


# A z-loss on split vocabularies


def _z_loss(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    losses, lse = _sharded(inputs, mesh, bug)
    count = inputs.valid_tokens
    if bug == "count of all ranks":
        count = _all_reduce(inputs.mask.sum(), None)
    count = count.clamp(min=1)
    squares = _total(lse**2, inputs)
    loss = (_total(losses, inputs) + options.z_loss_weight * squares) / count
    return lossgate.Outputs(loss=loss, metrics={"z_loss": squares.detach() / count})


_Z_LOSS: dict[str, Any] = _LOGITS | {"supports": {"z_loss_weight": lossgate.ANY}}


@lossgate.candidate("z_loss", **_Z_LOSS)
def right_sharded_z_loss(inputs, options, mesh):
    """Squares the whole normaliser, and divides by the tokens of the batch."""
    return _z_loss(inputs, options, mesh)


@lossgate.candidate("z_loss", **_Z_LOSS)
def z_loss_of_shifted_normaliser(inputs, options, mesh):
    """The z-loss squares the normaliser of shifted logits: the maximum is not added back to it."""
    return _z_loss(inputs, options, mesh, bug="shifted")


@lossgate.candidate("z_loss", **_Z_LOSS)
def tokens_counted_on_every_shard(inputs, options, mesh):
    """Trained tokens are added up over all ranks, so each is counted once for every shard of the
    vocabulary.
    """
    return _z_loss(inputs, options, mesh, bug="count of all ranks")


# A linear cross-entropy in chunks of tokens, on a column-parallel head


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, start, group, bug):
        losses = hidden.new_zeros(len(hidden), dtype=torch.float32)
        lse = torch.zeros_like(losses)
        for first in range(0, len(hidden), CHUNK):
            chunk = slice(first, first + CHUNK)
            logits = hidden[chunk].float() @ weight.float().T
            own, column = _owned(labels[chunk], start, len(weight))
            label = torch.where(own, logits.gather(-1, column[:, None])[:, 0], 0.0)
            gathered = [torch.empty(len(logits)) for _ in range(group.size())]
            dist.all_gather(gathered, logits.logsumexp(-1), group=group)
            lse[chunk] = torch.stack(gathered).logsumexp(0)
            losses[chunk] = lse[chunk] - _all_reduce(label, group)
        ctx.save_for_backward(hidden, weight, labels, lse)
        ctx.start, ctx.group, ctx.bug = start, group, bug
        return losses

    @staticmethod
    def backward(ctx, upstream):
        hidden, weight, labels, lse = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for first in range(0, len(hidden), CHUNK):
            chunk = slice(first, first + CHUNK)
            logits = hidden[chunk].float() @ weight.float().T
            dlogits = (logits - lse[chunk, None]).exp()
            own, column = _owned(labels[chunk], ctx.start, len(weight))
            dlogits[torch.arange(len(column)), column] -= own.float()
            dlogits = dlogits * upstream[chunk, None]
            grad_hidden[chunk] = dlogits @ weight.float()
            grad_weight += dlogits.T @ hidden[chunk].float()
            if ctx.bug == "reduced in the loop":
                dist.all_reduce(grad_hidden, group=ctx.group)
        if ctx.bug != "reduced in the loop":
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight, None, None, None, None


def _owned(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    own = (labels >= start) & (labels < start + width)
    return own, torch.where(own, labels - start, 0)


def _chunked(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    group = mesh.get_group("tp")
    losses = _ChunkedHead.apply(inputs.hidden, inputs.weight, inputs.labels, inputs.vocab_start, group, bug)
    return _total(losses, inputs) if options.reduction == "sum" else _mean(losses, inputs)


_HEAD: dict[str, Any] = {
    "head": "hidden",
    "axes": ("dp", "tp"),
    "dtypes": FLOAT32,
    "supports": {"reduction": lossgate.ANY},
    "tiles": {"token": CHUNK},
}


@lossgate.candidate("nll", **_HEAD)
def right_chunked_head(inputs, options, mesh):
    """Reduces the gradient of the hidden states once, after the loop."""
    return _chunked(inputs, options, mesh)


@lossgate.candidate("nll", **_HEAD)
def hidden_reduced_in_every_chunk(inputs, options, mesh):
    """The all-reduce of the gradient of the hidden states stands inside the loop over chunks, so
    earlier chunks are summed over ranks again and again.
    """
    return _chunked(inputs, options, mesh, bug="reduced in the loop")


# Log-probabilities whose sums go through autograd


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group):
        return _all_reduce(shard, group)

    @staticmethod
    def backward(ctx, upstream):
        return upstream, None


def _by_autograd(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> lossgate.Outputs:
    group = mesh.get_group("tp")
    logits = inputs.logits.float() / options.temperature
    peak = _all_reduce(logits.detach().amax(-1), group, dist.ReduceOp.MAX)
    shifted = logits - peak[:, None]
    lse = _SumOverShards.apply(shifted.exp().sum(-1), group).log()
    own, column = _owned(inputs.labels, inputs.vocab_start, logits.shape[-1])
    label = torch.where(own, shifted.gather(-1, column[:, None])[:, 0], 0.0)
    label = _all_reduce(label.detach(), group) if bug == "outside autograd" else _SumOverShards.apply(label, group)
    return lossgate.Outputs(logprobs=label - lse)


_TEMPERED: dict[str, Any] = _LOGITS | {"supports": {"temperature": lossgate.ANY}}


@lossgate.candidate("token_logprobs", **_TEMPERED)
def right_label_sum(inputs, options, mesh):
    """Sums the label's logit over shards by an autograd function."""
    return _by_autograd(inputs, options, mesh)


@lossgate.candidate("token_logprobs", **_TEMPERED)
def label_logit_summed_outside_autograd(inputs, options, mesh):
    """The label's logit is all-reduced outside autograd, so only the normaliser has a gradient."""
    return _by_autograd(inputs, options, mesh, bug="outside autograd")


# Packs that context parallelism splits in a zigzag


def _split(inputs: Any, options: Any, mesh: DeviceMesh, bug: str = "") -> Tensor:
    cp = mesh.get_group("cp")
    bounds = inputs.cu_seqlens_padded.tolist()
    labels, mask = inputs.input_ids[0].roll(-1), inputs.mask[0].roll(-1)
    mask[[end - 1 for start, end in pairwise(bounds) if start < end]] = False
    if bug == "whole pack":
        bounds = [0, bounds[-1]]
    if cp.size() > 1:
        places = [torch.arange(0)]
        for start, end in pairwise(bounds):
            pieces = torch.arange(start, end).tensor_split(2 * cp.size())
            places += [pieces[cp.rank()], pieces[2 * cp.size() - 1 - cp.rank()]]
        labels, mask = labels[torch.cat(places)], mask[torch.cat(places)]
    losses = F.cross_entropy(inputs.logits.float(), labels, reduction="none")
    total = torch.where(mask, losses, 0.0).sum()
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)


_PACKED: dict[str, Any] = {
    "head": "logits",
    "tokens": "packed",
    "axes": ("dp", "cp"),
    "dtypes": FLOAT32,
    "supports": {"reduction": lossgate.ANY},
}


@lossgate.candidate("nll", **_PACKED)
def right_zigzag(inputs, options, mesh):
    """Splits the labels of each sequence as its logits are split."""
    return _split(inputs, options, mesh)


@lossgate.candidate("nll", **_PACKED)
def zigzag_of_whole_pack(inputs, options, mesh):
    """The zigzag splits the labels of the pack as if it were one sequence, and not those of each
    sequence.
    """
    return _split(inputs, options, mesh, bug="whole pack")


BUGS = {
    "padding_columns_in_softmax": ("tp=2",),
    "start_by_own_width": ("tp=2",),
    "softmax_saved_in_bfloat16": ("single", "tp=2"),
    "largest_logit_of_shard": ("tp=2", "dp=2,tp=2"),
    "z_loss_of_shifted_normaliser": ("tp=2", "single"),
    "tokens_counted_on_every_shard": ("tp=2", "dp=2,tp=2"),
    "hidden_reduced_in_every_chunk": ("tp=2", "dp=2,tp=2"),
    "label_logit_summed_outside_autograd": ("single", "tp=2"),
    "zigzag_of_whole_pack": ("cp=2",),
}
RIGHT = (
    "right_reported",
    "right_sharded_z_loss",
    "right_chunked_head",
    "right_label_sum",
    "right_zigzag",
)
