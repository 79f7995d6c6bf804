# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from logits whose vocabulary is split over ranks.

The logits are never gathered.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused_losses.lm_head import without_autocast
from fused_losses.numerics import check_temperature
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
    """Computes ``log p(label)`` of each token, where ``p = softmax(logits / temperature)``.

    Any upstream gradient is supported. The vocabulary is split as in Megatron-LM
    (arXiv:1909.08053).

    Args:
        logits: ``[tokens, local_vocab]``, this rank's columns of the vocabulary.
        labels: ``[tokens]`` integer ids in the whole vocabulary. No rank owns a label outside of
            it, such as -100; the result for such a token is meaningless.
        temperature: divides the logits; positive.
        entropy: whether to return the entropy of p.
        logit_range: whether to return the smallest and the largest logit.
        vocab_start: id in the whole vocabulary of this rank's first column.
        vocab_rows: number of leading columns that belong to the vocabulary; all by default. The
            remaining ones are padding and get a gradient of zero.
        tp_group: the ranks among which the vocabulary is split; None if it is whole here.

    Returns:
        ``logprobs`` and, if asked for, ``entropy`` in nats, ``min_logits`` and ``max_logits``
        (before the temperature); else None. Each is ``[tokens]`` in float32 (float64 for float64
        logits) and the same on every rank of ``tp_group``. Log-probabilities and entropies carry
        gradients. The gradient of the logits is local, in their dtype.

    Raises:
        ValueError: A shape, ``temperature`` or ``vocab_rows`` does not fit.

    Collectives:
        Forward: one all-reduce MAX of ``[tokens]`` (``[2, tokens]`` with ``logit_range``) and one
        all-reduce SUM of ``[2, tokens]`` (``[3, tokens]`` with ``entropy``), in the dtype of the
        results. Backward: none.

    Memory:
        Saved for backward: the logits, the labels and one number for each token (two with
        ``entropy``).
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {list(logits.shape)} and labels {list(labels.shape)}: expected [tokens, vocab] and [tokens]"
        )
    check_temperature(temperature)
    if vocab_rows is not None and not 0 <= vocab_rows <= logits.shape[1]:
        raise ValueError(
            f"vocab_rows {vocab_rows}: logits have {logits.shape[1]} columns; "
            f"expected 0 to {logits.shape[1]}, or None for all"
        )
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
    """Returns logits over temperature without padding: a new tensor in the compute dtype."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.div(logits[:, :rows].to(dtype), temperature)
