# SPDX-License-Identifier: Apache-2.0
"""What tests of NeMo-RL's losses share: logits whose labels have chosen log-probabilities."""

import torch
from torch import Tensor

import dense_losses
from fused_losses import linear_logprobs, vocab_parallel_logprobs

PUBLISHED = 1e-3
VOCAB = 8
DTYPES = [torch.float32, torch.float64]
PATHS = ["fused", "unfused", "dense"]


def mean(*values: float) -> float:
    return sum(values) / len(values)


def exact_logits(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Makes logits ``[B, 4, 8]`` in which next ids have these log-probabilities ``[B, 3]``.

    A label has the logit 0, another id the rest of the probability, and all others next to none.
    """
    logits = torch.full((*ids.shape, VOCAB), -100.0, dtype=logprobs.dtype)
    label, other = ids[:, 1:, None], (ids[:, 1:, None] + 1) % VOCAB
    logits[:, :-1].scatter_(2, label, 0.0)
    logits[:, :-1].scatter_(2, other, (-logprobs).expm1().log()[..., None].clamp(min=-100))
    return logits


def ids_of(rows: int, length: int = 4) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(42))


def logprobs_by(path: str, logits: Tensor, ids: Tensor) -> Tensor:
    """Computes log-probabilities of next ids ``[B (S - 1)]``."""
    rows, labels = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    if path == "dense":
        return dense_losses.token_logprobs(rows, labels)
    if path == "unfused":
        return vocab_parallel_logprobs(rows, labels, chunk=2).logprobs
    # A unit matrix as the head makes these logits of hidden states that are equal to them.
    return linear_logprobs(rows, torch.eye(VOCAB, dtype=logits.dtype), labels, chunk=2).logprobs
