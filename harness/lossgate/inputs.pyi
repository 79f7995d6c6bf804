# SPDX-License-Identifier: Apache-2.0
# Written by python -m lossgate.reports.spec_files: change the specs, and run that.
"""What a kernel is given on each rank, for each spec and head."""

from torch import Tensor

from lossgate.losses.clipped_pg import ClippedPgBatch as ClippedPgBatch
from lossgate.losses.distill import DistillBatch as DistillBatch
from lossgate.losses.divergence import DivergenceBatch as DivergenceBatch
from lossgate.losses.dpo import DpoBatch as DpoBatch
from lossgate.losses.grpo import GrpoBatch as GrpoBatch
from lossgate.losses.nll import NllBatch as NllBatch
from lossgate.losses.shared.pairs import PairBatch as PairBatch
from lossgate.losses.value import ValueBatch as ValueBatch
from lossgate.specs.heads.hidden import Hidden as Hidden
from lossgate.specs.heads.logits import Logits as Logits
from lossgate.specs.heads.logprobs import Logprobs as Logprobs
from lossgate.specs.heads.rewards import Rewards as Rewards
from lossgate.specs.heads.values import Values as Values
from lossgate.specs.inputs import Batch as Batch

class ClippedPgHidden(Hidden, ClippedPgBatch):
    """What a kernel of spec clipped_pg gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    prev_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update."""
    generation_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy that generated the tokens.
    """
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy."""
    advantages: Tensor
    """[token], float32: the advantage of each token."""
    rewards: Tensor
    """[sequence], float32: the reward of each of this dp rank's sequences."""
    sample_mask: Tensor
    """[sequence], bool: the sequence counts. mask is the token mask alone."""
    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch."""
    positive_tokens: Tensor
    """scalar, int64: trained tokens in sequences that count and have a reward above 0, of the whole
    batch.
    """
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class ClippedPgLogits(Logits, ClippedPgBatch):
    """What a kernel of spec clipped_pg gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    prev_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update."""
    generation_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy that generated the tokens.
    """
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy."""
    advantages: Tensor
    """[token], float32: the advantage of each token."""
    rewards: Tensor
    """[sequence], float32: the reward of each of this dp rank's sequences."""
    sample_mask: Tensor
    """[sequence], bool: the sequence counts. mask is the token mask alone."""
    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch."""
    positive_tokens: Tensor
    """scalar, int64: trained tokens in sequences that count and have a reward above 0, of the whole
    batch.
    """
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class ClippedPgLogprobs(Logprobs, ClippedPgBatch):
    """What a kernel of spec clipped_pg gets on a rank at head "logprobs"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    prev_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update."""
    generation_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy that generated the tokens.
    """
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy."""
    advantages: Tensor
    """[token], float32: the advantage of each token."""
    rewards: Tensor
    """[sequence], float32: the reward of each of this dp rank's sequences."""
    sample_mask: Tensor
    """[sequence], bool: the sequence counts. mask is the token mask alone."""
    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch."""
    positive_tokens: Tensor
    """scalar, int64: trained tokens in sequences that count and have a reward above 0, of the whole
    batch.
    """
    logprobs: Tensor
    """[token], the dtype of the problem: log-probabilities of the labels; requires grad. Equal on
    all tp ranks.
    """

class DistillHidden(Hidden, DistillBatch):
    """What a kernel of spec distill gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    teacher_logits: Tensor
    """[token, topk], float32: the teacher's logits at teacher_indices, before the temperature."""
    teacher_indices: Tensor
    """[token, topk], int64: ids in the whole vocabulary, distinct for each token."""
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class DistillLogits(Logits, DistillBatch):
    """What a kernel of spec distill gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    teacher_logits: Tensor
    """[token, topk], float32: the teacher's logits at teacher_indices, before the temperature."""
    teacher_indices: Tensor
    """[token, topk], int64: ids in the whole vocabulary, distinct for each token."""
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class DivergenceHidden(Hidden, DivergenceBatch):
    """What a kernel of spec divergence gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    teacher_logits: Tensor
    """[token, vocab], float32: this rank's columns of the teacher's logits, before the temperature.
    """
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class DivergenceLogits(Logits, DivergenceBatch):
    """What a kernel of spec divergence gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    teacher_logits: Tensor
    """[token, vocab], float32: this rank's columns of the teacher's logits, before the temperature.
    """
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class DpoHidden(Hidden, DpoBatch):
    """What a kernel of spec dpo gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.
    """
    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy, in the layout of
    option reference_layout.
    """
    reference_hidden: Tensor
    """[token, reference_width], float32: the last hidden states of the reference model, exact in
    the dtype of the policy's; reference_width is 0 unless scenario reference is 'model'.
    """
    reference_weight: Tensor
    """[vocab, reference_width], float32: the reference model's lm-head weight: its logits give
    reference_logprobs, without bias or temperature.
    """
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class DpoLogits(Logits, DpoBatch):
    """What a kernel of spec dpo gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.
    """
    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy, in the layout of
    option reference_layout.
    """
    reference_hidden: Tensor
    """[token, reference_width], float32: the last hidden states of the reference model, exact in
    the dtype of the policy's; reference_width is 0 unless scenario reference is 'model'.
    """
    reference_weight: Tensor
    """[vocab, reference_width], float32: the reference model's lm-head weight: its logits give
    reference_logprobs, without bias or temperature.
    """
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class DpoLogprobs(Logprobs, DpoBatch):
    """What a kernel of spec dpo gets on a rank at head "logprobs"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.
    """
    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy, in the layout of
    option reference_layout.
    """
    reference_hidden: Tensor
    """[token, reference_width], float32: the last hidden states of the reference model, exact in
    the dtype of the policy's; reference_width is 0 unless scenario reference is 'model'.
    """
    reference_weight: Tensor
    """[vocab, reference_width], float32: the reference model's lm-head weight: its logits give
    reference_logprobs, without bias or temperature.
    """
    logprobs: Tensor
    """[token], the dtype of the problem: log-probabilities of the labels; requires grad. Equal on
    all tp ranks.
    """

class GrpoHidden(Hidden, GrpoBatch):
    """What a kernel of spec grpo gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    old_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update."""
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy."""
    vllm_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the engine that sampled the tokens; NaN
    at a token means that it is not known.
    """
    advantages: Tensor
    """[token], float32: the advantage of each token."""
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class GrpoLogits(Logits, GrpoBatch):
    """What a kernel of spec grpo gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    old_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update."""
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy."""
    vllm_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the engine that sampled the tokens; NaN
    at a token means that it is not known.
    """
    advantages: Tensor
    """[token], float32: the advantage of each token."""
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class GrpoLogprobs(Logprobs, GrpoBatch):
    """What a kernel of spec grpo gets on a rank at head "logprobs"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    old_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update."""
    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy."""
    vllm_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the engine that sampled the tokens; NaN
    at a token means that it is not known.
    """
    advantages: Tensor
    """[token], float32: the advantage of each token."""
    logprobs: Tensor
    """[token], the dtype of the problem: log-probabilities of the labels; requires grad. Equal on
    all tp ranks.
    """

class LabelSmoothingHidden(Hidden, Batch):
    """What a kernel of spec label_smoothing gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class LabelSmoothingLogits(Logits, Batch):
    """What a kernel of spec label_smoothing gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class NllHidden(Hidden, NllBatch):
    """What a kernel of spec nll gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    real: Tensor
    """[token], bool: the token is no padding."""
    real_tokens: Tensor
    """scalar, int64: tokens that are no padding, of the whole batch."""
    trained_sequences: Tensor
    """scalar, int64: sequences with a trained token, of the whole batch."""
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class NllLogits(Logits, NllBatch):
    """What a kernel of spec nll gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    real: Tensor
    """[token], bool: the token is no padding."""
    real_tokens: Tensor
    """scalar, int64: tokens that are no padding, of the whole batch."""
    trained_sequences: Tensor
    """scalar, int64: sequences with a trained token, of the whole batch."""
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class NllLogprobs(Logprobs, NllBatch):
    """What a kernel of spec nll gets on a rank at head "logprobs"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    real: Tensor
    """[token], bool: the token is no padding."""
    real_tokens: Tensor
    """scalar, int64: tokens that are no padding, of the whole batch."""
    trained_sequences: Tensor
    """scalar, int64: sequences with a trained token, of the whole batch."""
    logprobs: Tensor
    """[token], the dtype of the problem: log-probabilities of the labels; requires grad. Equal on
    all tp ranks.
    """

class PreferenceRewards(Rewards, PairBatch):
    """What a kernel of spec preference gets on a rank at head "rewards"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.
    """
    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """
    rewards: Tensor
    """[sequence], the dtype of the problem: the predictions of the reward model, one for each of
    this dp rank's sequences; requires grad. Equal on all cp and tp ranks.
    """

class SoftcapHidden(Hidden, Batch):
    """What a kernel of spec softcap gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class SoftcapLogits(Logits, Batch):
    """What a kernel of spec softcap gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class TokenLogprobsHidden(Hidden, Batch):
    """What a kernel of spec token_logprobs gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class TokenLogprobsLogits(Logits, Batch):
    """What a kernel of spec token_logprobs gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """

class ValueValues(Values, ValueBatch):
    """What a kernel of spec value gets on a rank at head "values"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the value is trained."""
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    old_values: Tensor
    """[token], float32: the value of each token at the time of the rollout."""
    returns: Tensor
    """[token], float32: the return of each token, which its value should be."""
    values: Tensor
    """[token], the dtype of the problem: the predictions of the value head; requires grad. Equal on
    all tp ranks.
    """

class ZLossHidden(Hidden, Batch):
    """What a kernel of spec z_loss gets on a rank at head "hidden"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    hidden: Tensor
    """[token, hidden], the dtype of the problem: the last hidden states; requires grad."""
    weight: Tensor
    """[vocab, hidden], the dtype of the problem: this rank's rows of the lm-head; requires grad.
    """
    bias: Tensor | None
    """[vocab], the dtype of the problem: its bias, or None; requires grad."""

class ZLossLogits(Logits, Batch):
    """What a kernel of spec z_loss gets on a rank at head "logits"."""

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.
    """
    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.
    """
    input_ids: Tensor
    """[token], int64: the tokens themselves."""
    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank."""
    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start, end to end without
    padding.
    """
    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where they start in this dp rank's padded pack, before cp splits it.
    """
    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank. The normaliser of a token
    mean; may be 0.
    """
    vocab_size: int
    """scalar, a Python int: rows of the whole vocabulary, over every tp rank, without padding rows.
    """
    vocab_start: int
    """scalar, a Python int: first row of the vocabulary that this rank owns."""
    vocab_end: int
    """scalar, a Python int: one past the last. Rows beyond vocab_end - vocab_start of the local
    weight or logits are padding, and take no part in the softmax.
    """
    logits: Tensor
    """[token, vocab], the dtype of the problem: the logits, before the temperature; requires grad.
    """
