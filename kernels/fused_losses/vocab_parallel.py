# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from logits whose vocabulary is split over ranks, without gathering them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_losses.lm_head import without_autocast
from fused_losses.softmax import TokenLogprobs, TokenSoftmax, Upstream


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_range: bool = False,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> TokenLogprobs:
    """``log p(label)`` and the entropy of ``p = softmax(logits / temperature)``, token by token.

    logits: ``[T, local vocab]``, of which the first ``vocab_rows`` columns (default: all) belong to the vocabulary,
    from ``vocab_start`` of it on; further ones are padding, and get a gradient of zero. labels: ``[T]`` integer ids
    in the whole vocabulary; a label outside of it, such as -100, is owned by no rank, and its value means nothing.

    Returns logprobs ``[T]``, and if asked for (else None) entropy ``[T]`` in nats, and with ``logit_range`` the least and the greatest
    logit ``[T]``, before the temperature; all the same on every rank of ``tp_group``, in float32 (float64 for float64 logits). Logprobs and
    entropy carry gradients, and any upstream gradient is right. The gradient of the logits is local, and rounded to
    their dtype. Collectives: forward one all-reduce MAX of T (2 T with ``logit_range``) and one SUM of 2 T
    float32 numbers (3 T with entropy), backward none. Saved for backward: the logits and T numbers, 2 T with entropy.

    Raises ``ValueError`` for shapes and numbers that do not fit.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)}: expected [tokens, vocab] and [tokens]"
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature {temperature}: expected a positive number; for greedy decoding there is no log-probability"
        )
    if vocab_rows is not None and not 0 <= vocab_rows <= logits.shape[1]:
        raise ValueError(f"vocab_rows {vocab_rows}: logits have {logits.shape[1]} columns")
    rows = logits.shape[1] if vocab_rows is None else vocab_rows
    found = _VocabParallelLogprobs.apply(
        logits, labels - vocab_start, temperature, rows, (entropy, logit_range), tp_group
    )
    return TokenLogprobs.of(*found, (entropy, logit_range))  # type: ignore[misc]


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, rows: int, wanted: tuple[bool, bool], group: Any
    ) -> tuple[Tensor, ...]:
        softmax = TokenSoftmax.of(_tempered(logits, rows, temperature), labels, entropy=wanted[0], lowest=wanted[1])
        softmax.reduce(group)
        entropy, extremes = softmax.entropy, softmax.range(temperature)
        ctx.save_for_backward(logits, labels, softmax.logsumexp, entropy)
        ctx.temperature, ctx.rows, ctx.entropy = temperature, rows, wanted[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*extremes)
        return softmax.logprobs, entropy, *extremes

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        logits, labels, logsumexp, entropy = ctx.saved_tensors
        upstream = Upstream.of(
            of_logprobs, of_entropy if ctx.entropy else None, logsumexp, ctx.temperature, logsumexp.dtype
        )
        d = upstream.dlogits(
            _tempered(logits, ctx.rows, ctx.temperature),
            labels,
            logsumexp,
            entropy if upstream.of_entropy is not None else None,
        )
        grad = torch.zeros_like(logits)
        grad[:, : ctx.rows] = d
        return grad, None, None, None, None, None


def _tempered(logits: Tensor, rows: int, temperature: float) -> Tensor:
    """A new tensor, in the dtype of computation."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.div(logits[:, :rows].to(dtype), temperature)
