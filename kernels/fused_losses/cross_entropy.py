# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy (negative log-likelihood, the loss of SFT) on the log-probabilities of this package."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.linear_logprobs import linear_logprobs
from fused_losses.vocab_parallel import vocab_parallel_logprobs


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    valid_tokens: Tensor | int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    token_chunk: int = 1024,
    vocab_chunk: int = 4096,
) -> Tensor:
    """Cross-entropy of labels given hidden states and lm-head, without the ``[tokens, vocab]`` logits; a scalar in nats.

    A token counts if ``mask`` (``[T]`` bool, default all) has it and its label is not ``ignore_index``.
    ``"mean"`` divides by ``valid_tokens``: give the number of counted tokens of the whole batch, over every data- and
    context-parallel rank and microbatch, and the ranks' losses and gradients add up; without it, those of this call.
    0 where no token counts. See ``linear_logprobs`` for the other arguments, dtypes, memory and collectives.
    """
    logprobs, _ = linear_logprobs(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        vocab_start=vocab_start,
        vocab_rows=vocab_rows,
        tp_group=tp_group,
        token_chunk=token_chunk,
        vocab_chunk=vocab_chunk,
    )
    return _reduce(logprobs, _counted(labels, mask, ignore_index), valid_tokens, reduction)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    valid_tokens: Tensor | int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_start: int = 0,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Cross-entropy of labels given logits whose vocabulary is split over ``tp_group``; a scalar in nats.

    See ``linear_cross_entropy`` for what counts, and ``vocab_parallel_logprobs`` for the other arguments.
    """
    logprobs, _ = vocab_parallel_logprobs(logits, labels, temperature=temperature, vocab_start=vocab_start, vocab_rows=vocab_rows, tp_group=tp_group)
    return _reduce(logprobs, _counted(labels, mask, ignore_index), valid_tokens, reduction)


def _counted(labels: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    counted = labels != ignore_index
    return counted if mask is None else counted & mask


def _reduce(logprobs: Tensor, counted: Tensor, valid_tokens: Tensor | int | None, reduction: str) -> Tensor:
    total = -torch.where(counted, logprobs, 0.0).sum()
    if reduction == "sum":
        return total
    if reduction != "mean":
        raise ValueError(f"reduction {reduction!r}: expected 'mean' or 'sum'")
    count = counted.sum() if valid_tokens is None else torch.as_tensor(valid_tokens, device=total.device)
    return total / count.clamp(min=1)
