# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from logits whose vocabulary is split over ranks, without gathering them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.softmax import RunningSoftmax


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """``log p(label)`` and the entropy of ``p = softmax(logits / temperature)``, token by token.

    logits: ``[T, local vocab]``, of which the first ``vocab_rows`` columns (default: all) belong to the vocabulary,
    from ``vocab_start`` of it on; further ones are padding, and get a gradient of zero. labels: ``[T]`` integer ids
    in the whole vocabulary; a label outside of it, such as -100, is owned by no rank, and its value means nothing.

    Returns logprobs ``[T]`` and entropy ``[T]``, the same on every rank of ``tp_group``, in float32 (float64 for
    float64 logits); entropy, in nats, carries no gradient. Any upstream gradient of logprobs is right. The gradient of
    the logits is local, and rounded to their dtype. Collectives: forward one all-reduce MAX of T and one SUM of 3 T
    float32 numbers, backward none.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"logits {list(logits.shape)} and labels {list(labels.shape)}: expected [tokens, vocab] and [tokens]")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: expected a positive number; for greedy decoding there is no log-probability")
    rows = logits.shape[1] if vocab_rows is None else vocab_rows
    return _VocabParallelLogprobs.apply(logits, labels - vocab_start, temperature, rows, tp_group)  # type: ignore[return-value]


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float, rows: int, group: Any) -> tuple[Tensor, Tensor]:
        running = RunningSoftmax.start(len(logits), logits)
        if rows:
            running.add(slice(None), logits[:, :rows].to(running.total.dtype) / temperature, labels)
        running.reduce(group)
        ctx.save_for_backward(logits, labels, running.logsumexp)
        ctx.temperature, ctx.rows = temperature, rows
        entropy = running.entropy
        ctx.mark_non_differentiable(entropy)
        return running.logprobs, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, logsumexp = ctx.saved_tensors
        rows, live = ctx.rows, (upstream != 0)[:, None]
        p = (logits[:, :rows].to(upstream.dtype) / ctx.temperature - logsumexp[:, None]).exp_()
        scale = upstream / ctx.temperature
        d = torch.where(live, p * -scale[:, None], 0.0)  # a token without upstream gradient takes no part, NaN or not
        here = ((labels >= 0) & (labels < rows) & live.squeeze(1)).nonzero().squeeze(1)
        d.index_put_((here, labels[here]), scale[here], accumulate=True)
        grad = torch.zeros_like(logits)
        grad[:, :rows] = d
        return grad, None, None, None, None
