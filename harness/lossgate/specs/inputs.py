# SPDX-License-Identifier: Apache-2.0
"""What a kernel is given on each rank: the local shards of one packed batch, and what is known of
the whole.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Common to every spec and head. T is the number of this rank's tokens, padding included.

    Labels and mask are shifted on the full sequence before it is split: position t's label is token
    t + 1. The raw ids are there for kernels that shift themselves.

    A candidate with ``tokens="rows"`` or ``"packed"`` gets what is ``[T, ...]`` here for whole
    sequences, as a framework has them before it shifts and splits: ``[B, S, ...]``, a row for each
    sequence of its dp rank, of any width; or ``[1, padded T, ...]``, the padded pack of its dp
    rank. What belongs to the prediction of a token is then at that token, one entry later. So
    labels are the ids themselves, and advantages and log-probabilities of other policies have an
    unused entry at the first token. Entries without a value hold anything: the first of each
    sequence, its mask too, and padding, where masks are false. Hidden states, logits and other
    differentiable inputs stay those of this rank: its tokens after padding and split.
    """

    labels: Tensor
    """``[T]`` int64 ids in the whole vocabulary. Where ``mask`` is false they mean nothing, but are
    valid ids."""
    mask: Tensor
    """``[T]`` bool: the label is trained. Never true for the last token of a sequence, nor for
    padding."""
    input_ids: Tensor
    """``[T]`` int64."""
    sequence: Tensor
    """``[T]`` int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """``[sequences + 1]`` int32: where the sequences of this dp rank would start, end to end
    without padding."""
    cu_seqlens_padded: Tensor
    """``[sequences + 1]`` int32: where they start in this dp rank's padded pack, before cp splits
    it."""
    valid_tokens: Tensor
    """Scalar int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0."""
    vocab_size: int
    """Of the whole vocabulary, over every tp rank, without padding rows."""
    vocab_start: int
    """First row of the vocabulary that this rank owns."""
    vocab_end: int
    """One past the last. Rows beyond ``vocab_end - vocab_start`` of the local weight or logits are
    padding, and take no part in the softmax."""


@dataclass(frozen=True, kw_only=True)
class HiddenHead:
    """What head "hidden" gives."""

    hidden: Tensor
    """``[T, H]``, requires grad."""
    weight: Tensor
    """``[local vocab, H]``, requires grad."""
    bias: Tensor | None
    """``[local vocab]``, requires grad, or None."""


@dataclass(frozen=True, kw_only=True)
class LogitsHead:
    """What head "logits" gives."""

    logits: Tensor
    """``[T, local vocab]``, requires grad; before the temperature."""


@dataclass(frozen=True, kw_only=True)
class LogprobsHead:
    """What head "logprobs" gives."""

    logprobs: Tensor
    """``[T]``, of the labels; requires grad. Equal on all tp ranks."""


@dataclass(frozen=True, kw_only=True)
class ValuesHead:
    """What head "values" gives."""

    values: Tensor
    """``[T]``, of the value head; requires grad. Equal on all tp ranks."""


@dataclass(frozen=True, kw_only=True)
class RewardsHead:
    """What head "rewards" gives."""

    rewards: Tensor
    """``[S]``, of the reward model, one for each of this dp rank's sequences; requires grad. Equal
    on all cp and tp ranks."""


@dataclass(frozen=True, kw_only=True)
class HiddenInputs(HiddenHead, PackedBatch):
    """Of a spec that adds nothing to ``PackedBatch``, at head "hidden"."""


@dataclass(frozen=True, kw_only=True)
class LogitsInputs(LogitsHead, PackedBatch):
    """At head "logits"."""
