# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that lossgate judges on the CPU: cross-entropy of logits, row by row.

    lossgate verify examples/triton_cross_entropy.py

Triton has an interpreter, which runs a kernel program by program on tensors of the CPU. It is used
where there is no GPU; docs/how-to/gpu.md says what to mind.
"""

# pyright: reportMissingParameterType=false
# Triton takes no annotation of a kernel's arguments but constexpr.

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lossgate.inputs import NllLogits
from lossgate.options import NllOptions

# Triton decides when it is imported whether kernels are interpreted. Without a GPU they must be.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton  # pyright: ignore[reportMissingImports]  # there is none for macOS
import triton.language as tl  # pyright: ignore[reportMissingImports]

import lossgate

IGNORED: Any = tl.constexpr(-100)
"""The label of tokens that do not count."""

LEAST: Any = tl.constexpr(torch.finfo(torch.float32).min)
"""Where a running maximum starts. At -inf, a block of nothing but -inf would give
exp(-inf - -inf), which is NaN."""


@triton.jit
def _forward(logits, labels, losses, logsumexps, vocab, BLOCK: tl.constexpr):  # noqa: N803
    """Writes the loss and the logsumexp of one token, in one pass over its logits."""
    token = tl.program_id(0).to(tl.int64)  # token * vocab may be more than an int32 holds
    label = tl.load(labels + token)
    largest = LEAST
    total = 0.0  # of exp(z - largest)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + token * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger), 0)
        largest = larger
    logsumexp = largest + tl.log(total)
    counted = label != IGNORED
    z_label = tl.load(logits + token * vocab + label, mask=counted, other=0.0).to(tl.float32)
    tl.store(losses + token, tl.where(counted, logsumexp - z_label, 0.0))
    tl.store(logsumexps + token, logsumexp)


@triton.jit
def _backward(
    logits,
    labels,
    logsumexps,
    upstream,
    grads,
    vocab,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Writes the gradient of one token's logits: upstream (softmax - onehot)."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token)
    logsumexp = tl.load(logsumexps + token)
    scale = tl.load(upstream + token)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + token * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        onehot = tl.where(at == label, 1.0, 0.0)
        grad = tl.where(label != IGNORED, scale * (tl.exp(z - logsumexp) - onehot), 0.0)
        tl.store(grads + token * vocab + at, grad, mask=at < vocab)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, block: int) -> Tensor:
        tokens, vocab = logits.shape
        logits = logits.contiguous()
        losses, logsumexps = torch.empty(2, tokens, dtype=torch.float32, device=logits.device)
        given = logits, labels, losses, logsumexps, vocab
        _forward[(tokens,)](*given, BLOCK=block)  # pyright: ignore[reportArgumentType]
        ctx.save_for_backward(logits, labels, logsumexps)
        ctx.block = block
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, logsumexps = ctx.saved_tensors
        tokens, vocab = logits.shape
        # The interpreter cuts float32 off where it stores bfloat16, and a GPU rounds to nearest. So
        # the kernel stores float32, and torch rounds.
        grads = torch.empty(tokens, vocab, dtype=torch.float32, device=logits.device)
        # Behind a sum the upstream gradient is one number, expanded. The kernel reads one for each
        # token.
        _backward[(tokens,)](logits, labels, logsumexps, upstream.contiguous(), grads, vocab, BLOCK=ctx.block)
        return grads.to(logits.dtype), None, None


def token_losses(logits: Tensor, labels: Tensor, block: int = 1024) -> Tensor:
    """Returns ``-log softmax(logits)[label]`` of each token.

    Args:
        logits: ``[tokens, vocab]``.
        labels: ``[tokens]`` int64; the loss of a token with label -100 is 0.
        block: number of logits that are held at a time; a power of 2.

    Returns:
        ``[tokens]`` in float32.
    """
    return _TokenLosses.apply(logits, labels, block)  # type: ignore[return-value]


SMALL, LARGE = 16, 256


def block_for(vocab: int) -> int:
    """Returns how many logits are held at a time: few of a small vocabulary, so that small problems
    turn the loops. A large one would take the interpreter minutes so.
    """
    return SMALL if vocab <= LARGE else LARGE


@lossgate.candidate(
    "nll",
    head="logits",
    supports={"reduction": lossgate.ANY},
    tiles={"vocab": (SMALL, LARGE)},
    good_for="an example: Triton, interpreted where there is no GPU",
)
def triton_cross_entropy(inputs: NllLogits, options: NllOptions, mesh: DeviceMesh) -> Tensor:
    labels = inputs.labels.masked_fill(~inputs.mask, -100)
    total = token_losses(inputs.logits, labels, block_for(inputs.logits.shape[1])).sum()
    return total if options.reduction == "sum" else total / inputs.valid_tokens.clamp(min=1)
