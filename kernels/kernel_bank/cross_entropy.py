# SPDX-License-Identifier: Apache-2.0
"""A fused cross-entropy kernel whose truth is known: correct in several precisions, with switches
for known bugs.

It computes spec ``nll`` from head "hidden", sharded over dp, cp and tp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lossgate.declaration.candidate import Candidate, Outputs, candidate
from lossgate.declaration.precision import Precision
from lossgate.declaration.supports import ANY
from lossgate.inputs import NllHidden
from lossgate.options import NllOptions

TILE = 37
"""Rows per step of the online kernel."""


@dataclass(frozen=True)
class Style:
    """How a kernel computes."""

    name: str
    precision: Precision
    eager: bool = False
    """Backward is left to autograd."""
    online: bool = False
    """The logsumexp is computed tile by tile."""


FLOAT32 = Precision()
STYLES = {
    "float32": (Style("eager", FLOAT32, eager=True), Style("fused", FLOAT32), Style("online", FLOAT32, online=True)),
    "bfloat16": (
        Style("fused, float32 logits, float32 dlogits", FLOAT32),
        Style("fused, float32 logits, bfloat16 dlogits", Precision(dlogits="bfloat16")),
        Style("online logsumexp, float32 logits", FLOAT32, online=True),
        Style(
            "eager, bfloat16 logits", Precision(logits="bfloat16", dlogits="bfloat16", reduce="bfloat16"), eager=True
        ),
    ),
}
"""Correct kernels, by dtype of their inputs. The last is what most trainers do: logits in the
model's dtype, then float32."""

ALL_BFLOAT16 = Style(
    "eager, bfloat16 throughout",
    Precision(
        logits="bfloat16",
        logsumexp="bfloat16",
        logprobs="bfloat16",
        dlogits="bfloat16",
        reduce="bfloat16",
        loss="bfloat16",
    ),
    eager=True,
)
"""``cross_entropy`` of bfloat16 logits, as it is on CPU."""

Switch = Literal["drop vocab tile", "skip temperature in backward", "skip tp all-reduce", "accumulate dW in bfloat16"]
"""The bugs that only the inside of the kernel can have; ``kernel_bank.bugs`` describes them."""


def make(style: Style, switch: Switch | None = None) -> Candidate:
    """Returns a style's kernel, correct or with one bug switched on; declared as correct."""

    def kernel(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh) -> Outputs:
        logprobs = _logprobs(inputs, options, mesh, style, switch).to(getattr(torch, style.precision.loss))
        total = -torch.where(inputs.mask, logprobs, 0.0).sum()
        loss = total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)
        return Outputs(loss=loss, logprobs=logprobs)

    declare = candidate(
        "nll",
        head="hidden",
        axes=("dp", "cp", "tp"),
        precision=style.precision,
        supports={"temperature": ANY, "reduction": ANY, "bias": ANY},
        differentiable=("loss", "logprobs"),
        tiles={"vocab": TILE} if style.online else {},
        name=style.name,
    )
    return declare(kernel)


def _logprobs(inputs: NllHidden, options: NllOptions, mesh: DeviceMesh, style: Style, switch: Switch | None) -> Tensor:
    group = mesh.get_group("tp")
    if style.eager and group.size() == 1 and switch is None:
        return _eager(inputs, options, style)
    settings = _Settings(inputs.labels - inputs.vocab_start, options.temperature, style, switch, group)
    return _Fused.apply(inputs.hidden, inputs.weight, inputs.bias, settings)  # type: ignore[return-value]


def _eager(inputs: NllHidden, options: NllOptions, style: Style) -> Tensor:
    logits = inputs.hidden @ inputs.weight.T
    logits = logits if inputs.bias is None else logits + inputs.bias
    logits = logits / options.temperature
    logits = logits if style.precision.logprobs == "bfloat16" else logits.float()
    return torch.log_softmax(logits, -1).gather(-1, inputs.labels[:, None]).squeeze(-1)


@dataclass(frozen=True)
class _Settings:
    labels: Tensor
    temperature: float
    style: Style
    switch: Switch | None
    group: dist.ProcessGroup


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, at: _Settings) -> Tensor:
    rounded = _rounder(at.style.precision.logits)
    logits = rounded(hidden.float() @ weight.float().T)
    if bias is not None:
        logits = rounded(logits + bias.float())
    return rounded(logits / at.temperature)


def _rounder(dtype: str) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(getattr(torch, dtype)).float()


def _dropped(logits: Tensor, at: _Settings) -> Tensor:
    """Returns which rows of the vocabulary the kernel forgets."""
    forgotten = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    if at.switch == "drop vocab tile":
        forgotten[-16:] = True
    return forgotten


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, at: _Settings) -> Tensor:
        logits = _logits(hidden, weight, bias, at)
        largest, total = _statistics(logits.masked_fill(_dropped(logits, at), float("-inf")), at.style.online)
        shared = largest.clone()
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=at.group)
        here = (at.labels >= 0) & (at.labels < logits.shape[1])
        label = torch.zeros(len(logits), device=logits.device)
        label[here] = logits[here, at.labels[here]]
        sums = torch.stack([total * (largest - shared).exp(), label])
        dist.all_reduce(sums, group=at.group)
        logsumexp = shared + sums[0].log()
        ctx.save_for_backward(hidden, weight, bias, logsumexp)
        ctx.at = at
        return sums[1] - logsumexp

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, logsumexp = ctx.saved_tensors
        at: _Settings = ctx.at
        logits = _logits(hidden, weight, bias, at)
        d = -(logits - logsumexp[:, None]).exp() * upstream[:, None]
        here = ((at.labels >= 0) & (at.labels < logits.shape[1])).nonzero().squeeze(1)
        d.index_put_((here, at.labels[here]), upstream[here], accumulate=True)
        d.masked_fill_(_dropped(logits, at), 0.0)
        d = d if at.switch == "skip temperature in backward" else d / at.temperature
        d = _rounder(at.style.precision.dlogits)(d)
        grad_hidden = _rounder(at.style.precision.reduce)(d @ weight.float())
        if at.switch != "skip tp all-reduce":
            grad_hidden = _all_reduce(grad_hidden, at)
        coarse = at.switch == "accumulate dW in bfloat16"
        grad_weight = _accumulate_in_bfloat16(d, hidden) if coarse else d.T @ hidden.float()
        return (
            grad_hidden.to(hidden.dtype),
            grad_weight.to(weight.dtype),
            None if bias is None else d.sum(0).to(bias.dtype),
            None,
        )


def _all_reduce(tensor: Tensor, at: _Settings) -> Tensor:
    summed = tensor.to(getattr(torch, at.style.precision.reduce))
    dist.all_reduce(summed, group=at.group)
    return summed.float()


def _statistics(logits: Tensor, online: bool) -> tuple[Tensor, Tensor]:
    total = torch.zeros(len(logits), device=logits.device)
    largest = torch.full_like(total, float("-inf"))
    for tile in logits.split(TILE if online else max(logits.shape[1], 1), 1) if logits.shape[1] else ():
        new = torch.maximum(largest, tile.amax(1))
        finite = torch.where(new.isfinite(), new, 0.0)
        total = total * (largest - finite).exp() + (tile - finite[:, None]).exp().sum(1)
        largest = new
    return largest, total


def _accumulate_in_bfloat16(d: Tensor, hidden: Tensor) -> Tensor:
    total = torch.zeros(d.shape[1], hidden.shape[1], dtype=torch.bfloat16, device=d.device)
    for row, h in zip(d, hidden.float(), strict=True):
        total += torch.outer(row, h).to(torch.bfloat16)
    return total.float()
