# SPDX-License-Identifier: Apache-2.0
# Written by python -m lossgate.reports.spec_files: change the specs, and run that.
"""What a kernel is given on each rank: a class for each spec and head."""

from torch import Tensor

from lossgate.losses.clipped_pg import ClippedPgBatch as ClippedPgBatch
from lossgate.losses.distill import DistillBatch as DistillBatch
from lossgate.losses.divergence import DivergenceBatch as DivergenceBatch
from lossgate.losses.dpo import DpoBatch as DpoBatch
from lossgate.losses.grpo import GrpoBatch as GrpoBatch
from lossgate.losses.nll import NllBatch as NllBatch
from lossgate.losses.shared.sequences import PairBatch as PairBatch
from lossgate.losses.value import ValueBatch as ValueBatch
from lossgate.specs.heads.hidden import Hidden as _Hidden
from lossgate.specs.heads.logits import Logits as _Logits
from lossgate.specs.heads.value_heads import Logprobs as _Logprobs
from lossgate.specs.heads.value_heads import Rewards as _Rewards
from lossgate.specs.heads.value_heads import Values as _Values
from lossgate.specs.packed_batch import Batch as _Batch

class Batch(_Batch):
    """A packed batch, common to every spec and head.

    A rank holds its own tokens, padding included. Labels and mask are shifted on the full sequence
    before it is split: position t's label is token t + 1. The raw ids are there for kernels that
    shift themselves.

    A candidate with ``tokens="rows"`` or ``"packed"`` gets whole sequences for each field that is
    ``[token, ...]`` here, as a framework has them before it shifts and splits. With "rows" the
    shape is ``[B, S, ...]``: a row for each sequence of its dp rank, of any width. With "packed" it
    is ``[1, padded T, ...]``: the padded pack of its dp rank. A value that belongs to the
    prediction of a token is then at that token, one entry later. So labels are the ids themselves,
    and advantages and log-probabilities of other policies have no value at the first token. The
    first entry of such a field, even of the mask, may hold anything. So may padding, except that
    masks are false there. Hidden states, logits and other differentiable inputs stay those of this
    rank: its tokens after padding and split.

    A reference gets the same fields for the whole batch, on one rank, without padding and in
    float64.
    """

    labels: Tensor
    """[token], int64: ids in the whole vocabulary. Where mask is false they mean nothing, but are
    valid ids.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    mask: Tensor
    """[token], bool: the label is trained. Never true for the last token of a sequence, nor for
    padding.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    input_ids: Tensor
    """[token], int64: the tokens themselves.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    sequence: Tensor
    """[token], int64: the number of each token's sequence, among those of this dp rank.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    cu_seqlens: Tensor
    """[sequences+1], int32: where the sequences of this dp rank would start if they were laid end
    to end without padding.

    sequences+1, on a rank: an entry for each sequence of its dp rank, and one more.
    """

    cu_seqlens_padded: Tensor
    """[sequences+1], int32: where the sequences start in this dp rank's padded pack, before cp
    splits it.

    sequences+1, on a rank: an entry for each sequence of its dp rank, and one more.
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
    """scalar, a Python int: one past the last row that this rank owns. Rows beyond vocab_end -
    vocab_start of the local weight or logits are padding, and take no part in the softmax.
    """

class Hidden(_Hidden):
    """The inputs that head "hidden" adds to the batch."""

    hidden: Tensor
    """[token, hidden], one of the candidate's dtypes: the last hidden states; requires grad.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    hidden, on a rank: the whole width.

    Its gradients: each dp and cp rank has its own part; each tp rank has the same.
    """

    weight: Tensor
    """[vocab, hidden], one of the candidate's dtypes: this rank's rows of the lm-head; requires
    grad.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.

    hidden, on a rank: the whole width.

    Its gradients: lossgate adds up the results of dp and cp ranks; each tp rank has its own
    part.
    """

    bias: Tensor | None
    """[vocab], one of the candidate's dtypes: the bias of the lm-head, or None; requires grad.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.

    Its gradients: lossgate adds up the results of dp and cp ranks; each tp rank has its own
    part.
    """

class Logits(_Logits):
    """The input that head "logits" adds to the batch."""

    logits: Tensor
    """[token, vocab], one of the candidate's dtypes: the logits, before the temperature; requires
    grad.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.

    Its gradients: each dp and cp and tp rank has its own part.
    """

class Logprobs(_Logprobs):
    """The input that head "logprobs" adds to the batch."""

    logprobs: Tensor
    """[token], one of the candidate's dtypes: log-probabilities of the labels; requires grad. Equal
    on all tp ranks.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    Its gradients: each dp and cp rank has its own part; each tp rank has the same.
    """

class Values(_Values):
    """The input that head "values" adds to the batch."""

    values: Tensor
    """[token], one of the candidate's dtypes: the predictions of the value head; requires grad.
    Equal on all tp ranks.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    Its gradients: each dp and cp rank has its own part; each tp rank has the same.
    """

class Rewards(_Rewards):
    """The input that head "rewards" adds to the batch."""

    rewards: Tensor
    """[sequence], one of the candidate's dtypes: the predictions of the reward model, one for each
    of this dp rank's sequences; requires grad. Equal on all cp and tp ranks.

    sequence, on a rank: the sequences of its dp rank.

    Its gradients: lossgate adds up the results of cp ranks; each dp rank has its own part; each
    tp rank has the same.
    """

class ClippedPgHidden(Hidden, ClippedPgBatch, Batch):
    """What a kernel of spec clipped_pg gets on a rank at head "hidden": from the last hidden states
    and the lm-head.

    clipped_pg: clipped policy gradient: PPO, GRPO, DAPO, REINFORCE, GSPO, CISPO, with KL penalty
    and off-policy weights.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequence: the sequences of its dp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list clipped_pg`` also shows the metrics. The options are
    ``lossgate.options.ClippedPgOptions``.
    """

    prev_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    generation_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy that generated the tokens.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    advantages: Tensor
    """[token], float32: the advantage of each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    rewards: Tensor
    """[sequence], float32: the reward of each of this dp rank's sequences.

    sequence, on a rank: the sequences of its dp rank.
    """

    sample_mask: Tensor
    """[sequence], bool: the sequence counts. mask is the token mask alone.

    sequence, on a rank: the sequences of its dp rank.
    """

    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch."""

    positive_tokens: Tensor
    """scalar, int64: trained tokens in sequences that count and have a reward above 0, of the whole
    batch.
    """

class ClippedPgLogits(Logits, ClippedPgBatch, Batch):
    """What a kernel of spec clipped_pg gets on a rank at head "logits": from the logits, before the
    temperature.

    clipped_pg: clipped policy gradient: PPO, GRPO, DAPO, REINFORCE, GSPO, CISPO, with KL penalty
    and off-policy weights.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequence: the sequences of its dp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list clipped_pg`` also shows the metrics. The options are
    ``lossgate.options.ClippedPgOptions``.
    """

    prev_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    generation_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy that generated the tokens.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    advantages: Tensor
    """[token], float32: the advantage of each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    rewards: Tensor
    """[sequence], float32: the reward of each of this dp rank's sequences.

    sequence, on a rank: the sequences of its dp rank.
    """

    sample_mask: Tensor
    """[sequence], bool: the sequence counts. mask is the token mask alone.

    sequence, on a rank: the sequences of its dp rank.
    """

    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch."""

    positive_tokens: Tensor
    """scalar, int64: trained tokens in sequences that count and have a reward above 0, of the whole
    batch.
    """

class ClippedPgLogprobs(Logprobs, ClippedPgBatch, Batch):
    """What a kernel of spec clipped_pg gets on a rank at head "logprobs": from the labels'
    log-probabilities.

    clipped_pg: clipped policy gradient: PPO, GRPO, DAPO, REINFORCE, GSPO, CISPO, with KL penalty
    and off-policy weights.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequence: the sequences of its dp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logprobs.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list clipped_pg`` also shows the metrics. The options are
    ``lossgate.options.ClippedPgOptions``.
    """

    prev_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    generation_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy that generated the tokens.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    advantages: Tensor
    """[token], float32: the advantage of each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    rewards: Tensor
    """[sequence], float32: the reward of each of this dp rank's sequences.

    sequence, on a rank: the sequences of its dp rank.
    """

    sample_mask: Tensor
    """[sequence], bool: the sequence counts. mask is the token mask alone.

    sequence, on a rank: the sequences of its dp rank.
    """

    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch."""

    positive_tokens: Tensor
    """scalar, int64: trained tokens in sequences that count and have a reward above 0, of the whole
    batch.
    """

class DistillHidden(Hidden, DistillBatch, Batch):
    """What a kernel of spec distill gets on a rank at head "hidden": from the last hidden states
    and the lm-head.

    distill: distillation: forward, reverse or mixed KL over the teacher's top-k.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.
    - topk: the whole.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list distill`` also shows the metrics. The options are
    ``lossgate.options.DistillOptions``.
    """

    teacher_logits: Tensor
    """[token, topk], float32: the teacher's logits at teacher_indices, before the temperature.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    topk, on a rank: the whole.
    """

    teacher_indices: Tensor
    """[token, topk], int64: ids in the whole vocabulary, distinct for each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    topk, on a rank: the whole.
    """

class DistillLogits(Logits, DistillBatch, Batch):
    """What a kernel of spec distill gets on a rank at head "logits": from the logits, before the
    temperature.

    distill: distillation: forward, reverse or mixed KL over the teacher's top-k.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - topk: the whole.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list distill`` also shows the metrics. The options are
    ``lossgate.options.DistillOptions``.
    """

    teacher_logits: Tensor
    """[token, topk], float32: the teacher's logits at teacher_indices, before the temperature.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    topk, on a rank: the whole.
    """

    teacher_indices: Tensor
    """[token, topk], int64: ids in the whole vocabulary, distinct for each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    topk, on a rank: the whole.
    """

class DivergenceHidden(Hidden, DivergenceBatch, Batch):
    """What a kernel of spec divergence gets on a rank at head "hidden": from the last hidden states
    and the lm-head.

    divergence: distillation over the whole vocabulary: forward or reverse KL, or a
    Jensen-Shannon divergence.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list divergence`` also shows the metrics. The options are
    ``lossgate.options.DivergenceOptions``.
    """

    teacher_logits: Tensor
    """[token, vocab], float32: this rank's columns of the teacher's logits, before the temperature.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.
    """

class DivergenceLogits(Logits, DivergenceBatch, Batch):
    """What a kernel of spec divergence gets on a rank at head "logits": from the logits, before the
    temperature.

    divergence: distillation over the whole vocabulary: forward or reverse KL, or a
    Jensen-Shannon divergence.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list divergence`` also shows the metrics. The options are
    ``lossgate.options.DivergenceOptions``.
    """

    teacher_logits: Tensor
    """[token, vocab], float32: this rank's columns of the teacher's logits, before the temperature.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.
    """

class DpoHidden(Hidden, DpoBatch, Batch):
    """What a kernel of spec dpo gets on a rank at head "hidden": from the last hidden states and
    the lm-head.

    dpo: direct preference optimisation and IPO, with an optional SFT term.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequence: the sequences of its dp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.
    - reference_width: the whole.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list dpo`` also shows the metrics. The options are
    ``lossgate.options.DpoOptions``.
    """

    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """

    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.

    sequence, on a rank: the sequences of its dp rank.
    """

    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy, in the layout of
    option reference_layout.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_hidden: Tensor
    """[token, reference_width], float32: the last hidden states of the reference model, exact in
    the dtype of the policy's; reference_width is 0 unless scenario reference is 'model'.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    reference_width, on a rank: the whole.
    """

    reference_weight: Tensor
    """[vocab, reference_width], float32: the reference model's lm-head weight: its logits give
    reference_logprobs, without bias or temperature.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.

    reference_width, on a rank: the whole.
    """

class DpoLogits(Logits, DpoBatch, Batch):
    """What a kernel of spec dpo gets on a rank at head "logits": from the logits, before the
    temperature.

    dpo: direct preference optimisation and IPO, with an optional SFT term.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequence: the sequences of its dp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - reference_width: the whole.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list dpo`` also shows the metrics. The options are
    ``lossgate.options.DpoOptions``.
    """

    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """

    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.

    sequence, on a rank: the sequences of its dp rank.
    """

    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy, in the layout of
    option reference_layout.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_hidden: Tensor
    """[token, reference_width], float32: the last hidden states of the reference model, exact in
    the dtype of the policy's; reference_width is 0 unless scenario reference is 'model'.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    reference_width, on a rank: the whole.
    """

    reference_weight: Tensor
    """[vocab, reference_width], float32: the reference model's lm-head weight: its logits give
    reference_logprobs, without bias or temperature.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.

    reference_width, on a rank: the whole.
    """

class DpoLogprobs(Logprobs, DpoBatch, Batch):
    """What a kernel of spec dpo gets on a rank at head "logprobs": from the labels'
    log-probabilities.

    dpo: direct preference optimisation and IPO, with an optional SFT term.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequence: the sequences of its dp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - reference_width: the whole.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logprobs.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list dpo`` also shows the metrics. The options are
    ``lossgate.options.DpoOptions``.
    """

    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """

    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.

    sequence, on a rank: the sequences of its dp rank.
    """

    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy, in the layout of
    option reference_layout.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_hidden: Tensor
    """[token, reference_width], float32: the last hidden states of the reference model, exact in
    the dtype of the policy's; reference_width is 0 unless scenario reference is 'model'.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.

    reference_width, on a rank: the whole.
    """

    reference_weight: Tensor
    """[vocab, reference_width], float32: the reference model's lm-head weight: its logits give
    reference_logprobs, without bias or temperature.

    vocab, on a rank: rows vocab_start to vocab_end of the vocabulary, and padding rows where
    vocab_split is padded.

    reference_width, on a rank: the whole.
    """

class GrpoHidden(Hidden, GrpoBatch, Batch):
    """What a kernel of spec grpo gets on a rank at head "hidden": from the last hidden states and
    the lm-head.

    grpo: group relative policy optimisation: DAPO or CISPO, with a KL penalty and corrections
    for the sampler.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list grpo`` also shows the metrics. The options are
    ``lossgate.options.GrpoOptions``.
    """

    old_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    vllm_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the engine that sampled the tokens; NaN
    at a token means that it is not known.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    advantages: Tensor
    """[token], float32: the advantage of each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

class GrpoLogits(Logits, GrpoBatch, Batch):
    """What a kernel of spec grpo gets on a rank at head "logits": from the logits, before the
    temperature.

    grpo: group relative policy optimisation: DAPO or CISPO, with a KL penalty and corrections
    for the sampler.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list grpo`` also shows the metrics. The options are
    ``lossgate.options.GrpoOptions``.
    """

    old_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    vllm_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the engine that sampled the tokens; NaN
    at a token means that it is not known.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    advantages: Tensor
    """[token], float32: the advantage of each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

class GrpoLogprobs(Logprobs, GrpoBatch, Batch):
    """What a kernel of spec grpo gets on a rank at head "logprobs": from the labels'
    log-probabilities.

    grpo: group relative policy optimisation: DAPO or CISPO, with a KL penalty and corrections
    for the sampler.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logprobs.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list grpo`` also shows the metrics. The options are
    ``lossgate.options.GrpoOptions``.
    """

    old_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the policy before the update.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    reference_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the reference policy.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    vllm_logprobs: Tensor
    """[token], float32: log-probabilities of the labels, of the engine that sampled the tokens; NaN
    at a token means that it is not known.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    advantages: Tensor
    """[token], float32: the advantage of each token.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

class LabelSmoothingHidden(Hidden, Batch):
    """What a kernel of spec label_smoothing gets on a rank at head "hidden": from the last hidden
    states and the lm-head.

    label_smoothing: negative log-likelihood with smoothed labels.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list label_smoothing`` also shows the metrics. The options are
    ``lossgate.options.LabelSmoothingOptions``.
    """

class LabelSmoothingLogits(Logits, Batch):
    """What a kernel of spec label_smoothing gets on a rank at head "logits": from the logits,
    before the temperature.

    label_smoothing: negative log-likelihood with smoothed labels.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list label_smoothing`` also shows the metrics. The options are
    ``lossgate.options.LabelSmoothingOptions``.
    """

class NllHidden(Hidden, NllBatch, Batch):
    """What a kernel of spec nll gets on a rank at head "hidden": from the last hidden states and
    the lm-head.

    nll: negative log-likelihood of the labels, over trained tokens (SFT).

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list nll`` also shows the metrics. The options are
    ``lossgate.options.NllOptions``.
    """

    real: Tensor
    """[token], bool: the token is no padding.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    real_tokens: Tensor
    """scalar, int64: tokens that are no padding, of the whole batch."""

    trained_sequences: Tensor
    """scalar, int64: sequences with a trained token, of the whole batch."""

class NllLogits(Logits, NllBatch, Batch):
    """What a kernel of spec nll gets on a rank at head "logits": from the logits, before the
    temperature.

    nll: negative log-likelihood of the labels, over trained tokens (SFT).

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list nll`` also shows the metrics. The options are
    ``lossgate.options.NllOptions``.
    """

    real: Tensor
    """[token], bool: the token is no padding.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    real_tokens: Tensor
    """scalar, int64: tokens that are no padding, of the whole batch."""

    trained_sequences: Tensor
    """scalar, int64: sequences with a trained token, of the whole batch."""

class NllLogprobs(Logprobs, NllBatch, Batch):
    """What a kernel of spec nll gets on a rank at head "logprobs": from the labels'
    log-probabilities.

    nll: negative log-likelihood of the labels, over trained tokens (SFT).

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logprobs.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list nll`` also shows the metrics. The options are
    ``lossgate.options.NllOptions``.
    """

    real: Tensor
    """[token], bool: the token is no padding.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    real_tokens: Tensor
    """scalar, int64: tokens that are no padding, of the whole batch."""

    trained_sequences: Tensor
    """scalar, int64: sequences with a trained token, of the whole batch."""

class PreferenceRewards(Rewards, PairBatch, Batch):
    """What a kernel of spec preference gets on a rank at head "rewards": from the reward model's
    scores.

    preference: the Bradley-Terry loss of a reward model.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequence: the sequences of its dp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.rewards.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list preference`` also shows the metrics. The options are
    ``lossgate.options.PreferenceOptions``.
    """

    valid_tokens: Tensor
    """scalar, int64: trained tokens of the whole batch, over every rank, in sequences that count.
    """

    sample_mask: Tensor
    """[sequence], bool: the sequence counts. The chosen response's entry decides about the pair.
    mask is the token mask only.

    sequence, on a rank: the sequences of its dp rank.
    """

    valid_sequences: Tensor
    """scalar, int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs.
    """

class SoftcapHidden(Hidden, Batch):
    """What a kernel of spec softcap gets on a rank at head "hidden": from the last hidden states
    and the lm-head.

    softcap: negative log-likelihood of soft-capped logits.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list softcap`` also shows the metrics. The options are
    ``lossgate.options.SoftcapOptions``.
    """

class SoftcapLogits(Logits, Batch):
    """What a kernel of spec softcap gets on a rank at head "logits": from the logits, before the
    temperature.

    softcap: negative log-likelihood of soft-capped logits.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list softcap`` also shows the metrics. The options are
    ``lossgate.options.SoftcapOptions``.
    """

class TokenLogprobsHidden(Hidden, Batch):
    """What a kernel of spec token_logprobs gets on a rank at head "hidden": from the last hidden
    states and the lm-head.

    token_logprobs: log-probabilities of the labels and entropies, with temperature and top-k /
    top-p filtering; no loss.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns ``lossgate.Outputs`` with the first of these at least, in float32 unless
    ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.
    - ``token_entropy``: [token]; each dp and cp rank has its own part; each tp rank has the
      same.

    ``lossgate list token_logprobs`` also shows the metrics. The options are
    ``lossgate.options.TokenLogprobsOptions``.
    """

class TokenLogprobsLogits(Logits, Batch):
    """What a kernel of spec token_logprobs gets on a rank at head "logits": from the logits, before
    the temperature.

    token_logprobs: log-probabilities of the labels and entropies, with temperature and top-k /
    top-p filtering; no loss.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns ``lossgate.Outputs`` with the first of these at least, in float32 unless
    ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.
    - ``token_entropy``: [token]; each dp and cp rank has its own part; each tp rank has the
      same.

    ``lossgate list token_logprobs`` also shows the metrics. The options are
    ``lossgate.options.TokenLogprobsOptions``.
    """

class ValueValues(Values, ValueBatch, Batch):
    """What a kernel of spec value gets on a rank at head "values": from the value head's
    predictions.

    value: clipped squared error of a value model.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.values.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.

    ``lossgate list value`` also shows the metrics. The options are
    ``lossgate.options.ValueOptions``.
    """

    mask: Tensor
    """[token], bool: the value is trained.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    old_values: Tensor
    """[token], float32: the value of each token at the time of the rollout.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

    returns: Tensor
    """[token], float32: the return of each token, which its value should be.

    token, on a rank: the tokens of its dp rank's sequences, padded; of each sequence, the two
    zigzag chunks of its cp rank.
    """

class ZLossHidden(Hidden, Batch):
    """What a kernel of spec z_loss gets on a rank at head "hidden": from the last hidden states and
    the lm-head.

    z_loss: negative log-likelihood plus the squared logarithm of the softmax's normaliser.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.
    - hidden: the whole width.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.hidden.grad, inputs.weight.grad, inputs.bias.grad. Unless ``lossgate.Contract``
    declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list z_loss`` also shows the metrics. The options are
    ``lossgate.options.ZLossOptions``.
    """

class ZLossLogits(Logits, Batch):
    """What a kernel of spec z_loss gets on a rank at head "logits": from the logits, before the
    temperature.

    z_loss: negative log-likelihood plus the squared logarithm of the softmax's normaliser.

    The part of each dim that a rank has; all of it if the layout does not split the dim:

    - token: the tokens of its dp rank's sequences, padded; of each sequence, the two zigzag
      chunks of its cp rank.
    - sequences+1: an entry for each sequence of its dp rank, and one more.
    - vocab: rows vocab_start to vocab_end of the vocabulary, and padding rows where vocab_split
      is padded.

    The kernel returns the loss alone, or ``lossgate.Outputs`` with more of these, in float32
    unless ``lossgate.Precision`` declares otherwise; backward leaves the gradients in
    inputs.logits.grad. Unless ``lossgate.Contract`` declares otherwise:

    - ``loss``: a scalar; lossgate adds up the results of dp and cp ranks; each tp rank has the
      same.
    - ``logprobs``: [token]; each dp and cp rank has its own part; each tp rank has the same.

    ``lossgate list z_loss`` also shows the metrics. The options are
    ``lossgate.options.ZLossOptions``.
    """
