# SPDX-License-Identifier: Apache-2.0
"""Ways to make the labels' log-probabilities, and entropies, from logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bank.columns import Columns

VOCAB_TILE = 32
"""Columns per step of what goes over the vocabulary tile by tile."""


@dataclass(frozen=True)
class Scores:
    """What a kernel has of some tokens before its loss."""

    logits: Tensor
    """``[tokens, columns]``: this rank's, after the temperature."""
    vocab: Columns
    labels: Tensor
    own_label: Tensor | None = None
    """The label's logit ``[tokens]``, where the kernel multiplies it apart from the others."""

    def label(self) -> Tensor:
        """Returns the label's logit ``[tokens]``."""
        return self.vocab.pick(self.logits, self.labels) if self.own_label is None else self.own_label


Way = Callable[[Scores], Tensor]
"""Makes values ``[tokens]``."""


# Log-probabilities


def log_softmax(s: Scores) -> Tensor:
    return torch.log_softmax(s.logits, -1).gather(-1, s.labels[:, None]).squeeze(-1)


def cross_entropy(s: Scores) -> Tensor:
    return -F.cross_entropy(s.logits, s.labels, reduction="none")


def label_less_logsumexp(s: Scores) -> Tensor:
    """The label's logit may come from a product of its own, as in cut cross-entropy."""
    return s.label() - torch.logsumexp(s.logits, -1)


def row_by_row(s: Scores) -> Tensor:
    """As TRL's selective log-softmax: one row after the other."""
    normalisers = [torch.logsumexp(row, -1) for row in s.logits]
    return s.label() - (torch.stack(normalisers) if normalisers else s.logits.sum(-1))


def one_hot(s: Scores) -> Tensor:
    hot = F.one_hot(s.labels, s.logits.shape[1]).to(s.logits.dtype)
    return (torch.log_softmax(s.logits, -1) * hot).sum(-1)


def online(s: Scores) -> Tensor:
    """As fused kernels: a running maximum, and a running sum that follows it.

    The maximum starts at a finite number: of a tile of -inf, exp(-inf - -inf) would be NaN.
    """
    top = torch.full_like(s.logits[:, 0], torch.finfo(s.logits.dtype).min)
    total = torch.zeros_like(top)
    for tile in s.logits.split(VOCAB_TILE, 1):
        new = torch.maximum(top, tile.detach().amax(1))
        total = total * (top - new).exp() + (tile - new[:, None]).exp().sum(1)
        top = new
    return s.label() - (top + total.log())


def logaddexp_of_tiles(s: Scores) -> Tensor:
    """The normalisers of tiles, put together by logaddexp."""
    tiles = [torch.logsumexp(tile, -1) for tile in s.logits.split(VOCAB_TILE, 1)]
    normaliser = tiles[0]
    for tile in tiles[1:]:
        normaliser = torch.logaddexp(normaliser, tile)
    return s.label() - normaliser


def parallel_logsumexp(s: Scores) -> Tensor:
    """Parallel over the vocabulary."""
    return s.label() - s.vocab.logsumexp(s.logits)


def parallel_shifted(s: Scores) -> Tensor:
    """As Megatron-LM: the largest logit is subtracted from all logits, the label's too."""
    top = s.vocab.largest(s.logits)
    shifted = s.logits - top[:, None]
    label = s.vocab.pick(s.logits, s.labels) - top
    return label - s.vocab.sum(shifted.exp()).log()


SINGLE: Mapping[str, Way] = {
    way.__name__: way
    for way in (log_softmax, cross_entropy, label_less_logsumexp, row_by_row, one_hot, online, logaddexp_of_tiles)
}
"""The ways that need the whole vocabulary on one rank, by name."""

NOT_SUPPRESSED: Mapping[Way, str] = {
    one_hot: "a product with a one-hot row multiplies 0 by -inf",
    logaddexp_of_tiles: "torch.logaddexp of two tiles of -inf has a slope of NaN",
}
"""The ways that give NaN where logits are -inf, and why."""


def exempt_for(way: Way) -> dict[str, str]:
    """Returns the properties that kernels of a way do not keep, and why."""
    return {"suppressed-ids": NOT_SUPPRESSED[way]} if way in NOT_SUPPRESSED else {}


# Entropies


def entropy_of_logits(s: Scores) -> Tensor:
    """lse - <p, z>."""
    p = torch.softmax(s.logits, -1)
    return torch.logsumexp(s.logits, -1) - (p * s.logits).sum(-1)


def entropy_of_logprobs(s: Scores) -> Tensor:
    """-<p, log p>."""
    log_p = torch.log_softmax(s.logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def above_zero(p: Tensor) -> Tensor:
    """Returns probabilities whose logarithm is finite: those that underflowed are the smallest."""
    return p.clamp(min=torch.finfo(p.dtype).tiny)


def entropy_of_probabilities(s: Scores) -> Tensor:
    """-<p, log p>, where p is a softmax."""
    p = torch.softmax(s.logits, -1)
    return -(p * above_zero(p).log()).sum(-1)


def entropy_of_categorical(s: Scores) -> Tensor:
    return torch.distributions.Categorical(logits=s.logits, validate_args=False).entropy()


def parallel_entropy(s: Scores) -> Tensor:
    """As Megatron-LM and verl: log S - <e, z - max> / S, parallel over the vocabulary."""
    shifted = s.logits - s.vocab.largest(s.logits)[:, None]
    exponentials = shifted.exp()
    total = s.vocab.sum(exponentials)
    return total.log() - s.vocab.sum(exponentials * shifted) / total
