# SPDX-License-Identifier: Apache-2.0
"""Three kernels with the bugs that sharding invites, each declared as if it were right."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lossgate


class _TokenLoss(torch.autograd.Function):
    """``-log p(label)`` of each token, with the vocabulary split over tp."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, group: Any, reduce_gradient: bool
    ) -> Tensor:
        logits = hidden.float() @ weight.float().T
        highest = logits.amax(1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - highest[:, None]).exp()
        owned = (labels >= 0) & (labels < rows)
        own = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        sums = torch.stack([exponentials.sum(1), torch.where(owned, own, 0.0)])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(hidden, weight, exponentials / sums[0][:, None], labels, owned)
        ctx.group, ctx.reduce_gradient = group, reduce_gradient
        return highest + sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        hidden, weight, gradient, labels, owned = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[owned, labels[owned]] -= 1
        gradient *= upstream[0][:, None]
        of_hidden = gradient @ weight.float()
        if ctx.reduce_gradient:
            dist.all_reduce(of_hidden, group=ctx.group)
        return of_hidden.to(hidden.dtype), (gradient.T @ hidden.float()).to(weight.dtype), None, None, None, None


def _loss(inputs: Any, mesh: DeviceMesh, *, last: int = 0, reduce_gradient: bool = True) -> Tensor:
    labels = inputs.labels - inputs.vocab_start
    rows = inputs.vocab_end - inputs.vocab_start - last
    losses = _TokenLoss.apply(inputs.hidden, inputs.weight, labels, rows, mesh.get_group("tp"), reduce_gradient)
    return (losses * inputs.mask).sum() / inputs.valid_tokens.clamp(min=1)  # type: ignore[operator]


_DECLARED: Any = {"head": "hidden", "axes": ("cp", "tp"), "dtypes": ("float32",), "supports": {"vocab_split": "even"}}


@lossgate.candidate("nll", **_DECLARED)
def right(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    return _loss(inputs, mesh)


@lossgate.candidate("nll", **_DECLARED)
def no_reduction_in_backward(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    """The gradient of the hidden states is each tp rank's own."""
    return _loss(inputs, mesh, reduce_gradient=False)


@lossgate.candidate("nll", **_DECLARED)
def gradient_times_cp(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    """Forward is right. Backward is as if the loss had been added up over cp by autograd."""
    loss, cp = _loss(inputs, mesh), mesh["cp"].size()
    return loss * cp + (loss - loss * cp).detach()


@lossgate.candidate("nll", **_DECLARED)
def label_lost_at_the_edge(inputs: Any, options: Any, mesh: DeviceMesh) -> Tensor:
    """The last row of each shard belongs to nobody."""
    return _loss(inputs, mesh, last=1)
