# SPDX-License-Identifier: Apache-2.0
"""How a kernel goes over its tokens: all at once, chunk by chunk, or with gradients in forward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernel_bank.right.formats import INPUTS

CHUNK = 7
"""Tokens per step of a loop."""

Part = Callable[..., Tensor]
"""``(tokens, rows, *lm_head) -> the loss of these tokens``, a scalar; ``rows`` are theirs alone."""


@dataclass(frozen=True)
class Loop:
    """A way to go over the tokens."""

    run: Callable[..., Tensor]
    """``(part, rows, *lm_head) -> the loss of all tokens``."""
    declares: Mapping[str, str | int | bool] = field(default_factory=dict)
    """What it adds to ``Precision``; ``INPUTS`` stands for the dtype of the inputs."""


def _whole(part: Part, rows: Tensor, *lm_head: Tensor) -> Tensor:
    return part(slice(None), rows, *lm_head)


def _chunked(part: Part, rows: Tensor, *lm_head: Tensor) -> Tensor:
    return _added(part(tokens, rows[tokens], *lm_head) for tokens in _chunks(rows))


def _recomputed(part: Part, rows: Tensor, *lm_head: Tensor) -> Tensor:
    return _added(
        checkpoint(part, tokens, rows[tokens], *lm_head, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportArgumentType]
        for tokens in _chunks(rows)
    )


def _in_forward(*, made: str, kept: str) -> Callable[..., Tensor]:
    """Returns a loop that makes and adds gradients up in one dtype, and keeps them in another."""

    def run(part: Part, rows: Tensor, *lm_head: Tensor) -> Tensor:
        dtypes = [rows.dtype if name == INPUTS else getattr(torch, name) for name in (made, kept)]
        return _InForward.apply(part, *dtypes, rows, *lm_head)  # pyright: ignore[reportReturnType]

    return run


def _chunks(rows: Tensor) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, max(len(rows), 1), CHUNK)]


def _added(parts: Any) -> Tensor:
    total, *others = parts
    for part in others:
        total = total + part
    return total


class _InForward(torch.autograd.Function):
    """Computes loss and gradients in forward, chunk by chunk.

    Leaves are cast to ``made`` before they are used, so gradients are made and added up in it. They
    are kept in ``kept`` until backward scales them.
    """

    @staticmethod
    def forward(ctx: Any, part: Part, made: torch.dtype, kept: torch.dtype, rows: Tensor, *lm_head: Tensor) -> Tensor:
        leaves = [leaf.detach().to(made) for leaf in (rows, *lm_head)]
        grads = [torch.zeros_like(leaf) for leaf in leaves]
        losses: list[Tensor] = []
        for tokens in _chunks(rows):
            own = [leaf.clone().requires_grad_() for leaf in (leaves[0][tokens], *leaves[1:])]
            with torch.enable_grad():
                loss = part(tokens, *own)
            grads[0][tokens], *others = torch.autograd.grad(loss, own)
            for grad, other in zip(grads[1:], others, strict=True):
                grad += other
            losses.append(loss.detach())
        ctx.save_for_backward(*(grad.to(kept) for grad in grads))
        ctx.dtype = rows.dtype
        return _added(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, None, *((grad * gradient).to(ctx.dtype) for grad in ctx.saved_tensors)


_LOW_SUMS = {"accumulate": INPUTS, "chunk": CHUNK}

WHOLE = Loop(_whole)
"""All tokens at once."""
CHUNKED = Loop(_chunked, _LOW_SUMS)
"""Chunk by chunk; autograd adds the gradients of the chunks up, in the dtype of the leaves."""
RECOMPUTED = Loop(_recomputed, _LOW_SUMS)
"""The same, and backward computes each chunk again."""
IN_FORWARD = Loop(_in_forward(made="float32", kept="float32"))
"""Gradients are made in forward, chunk by chunk, and scaled in backward."""
IN_FORWARD_ROUNDED = Loop(_in_forward(made="float32", kept=INPUTS), {"grads_in_forward": True})
"""The same, but they are kept in the inputs' dtype."""
IN_FORWARD_LOW = Loop(_in_forward(made=INPUTS, kept=INPUTS), {**_LOW_SUMS, "grads_in_forward": True})
"""As Liger's kernels: they are made, added up and kept in the inputs' dtype."""
