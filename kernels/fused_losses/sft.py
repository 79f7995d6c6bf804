# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning (SFT) on each rank's own tokens: the loss and the statistics of a run.

No logits are gathered.
"""

from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fused_losses.arguments import (
    UNTRAINED,
    as_count,
    as_labels_of,
    as_mask,
    as_sequence,
    check_choice,
    check_integer,
    check_setting,
)
from fused_losses.linear_logprobs import linear_logprobs
from fused_losses.lm_head import ranks_of_tokens
from fused_losses.metrics import Metrics
from fused_losses.names import named
from fused_losses.numerics import divisor
from fused_losses.ranks import is_first, sum_over
from fused_losses.softmax import TokenLogprobs
from fused_losses.token_layouts import TokenLayout, flatten_like, flatten_tokens


class SFTStatistics(Metrics):
    """The SFT statistics of AReaL over some tokens, under AReaL's names, in float64.

    Counts are ``n_seqs`` (sequences with a trained token), ``n_tokens`` (tokens without padding),
    ``n_valid_tokens`` (trained tokens) and ``prompt_tokens`` (neither trained nor padding).
    There are ``_avg``, ``_min`` and ``_max`` of ``ppl`` over sequences and of ``loss`` in nats over
    trained tokens; if asked for, also of ``entropy`` in nats over trained tokens, and of
    ``vocab_min_logits`` and ``vocab_max_logits`` over tokens without padding.

    Counts are sums. An ``_avg`` is a mean over its count, and a mean over nothing is 0. An extremum
    over nothing is infinite. ``loss_avg`` over all microbatches and ranks is the loss of an
    evaluation.
    """

    @classmethod
    def of(
        cls,
        tokens: TokenLogprobs,
        *,
        mask: Tensor,
        real: Tensor,
        sequence: Tensor,
        sequences: int,
        cp_group: dist.ProcessGroup | None = None,
    ) -> Self:
        """Computes the statistics of this rank's tokens, without gradients.

        The perplexity of a sequence is exp of its mean loss. The mean is taken over all tokens of
        the sequence, on all ranks, before exp.

        Args:
            tokens: the result of ``linear_logprobs``. If it has no ``entropy`` or ``logit_range``,
                their statistics are left out; every rank must do the same.
            mask: ``[tokens]`` bool or 0 and 1: the label is trained.
            real: ``[tokens]`` bool or 0 and 1: the token is not padding.
            sequence: ``[tokens]`` integers below ``sequences``, each token's sequence.
            sequences: the number of sequences in the pack.
            cp_group: the ranks over which the tokens of sequences are split.

        Raises:
            ValueError: An argument does not fit; the message names it.

        Collectives:
            One all-reduce SUM of ``[2, sequences]`` over ``cp_group``, always, also on a rank
            without trained tokens.
        """
        mask, real = (as_mask(name, x, tokens.logprobs) for name, x in {"mask": mask, "real": real}.items())
        sequence = as_sequence(sequence, mask, sequences, cp_group)
        loss = -tokens.logprobs.detach().double()
        per_token = torch.stack([torch.where(mask, loss, 0.0), mask.double()])
        of_sequences = sum_over(cp_group, loss.new_zeros(2, sequences).index_add(1, sequence, per_token))
        # All ranks that share a sequence know its perplexity; the first one reports it.
        reported = (of_sequences[1] > 0) & is_first(cp_group)
        ppl = (of_sequences[0] / of_sequences[1].clamp(min=1)).exp()
        counts = {"n_seqs": reported, "n_tokens": real, "n_valid_tokens": mask, "prompt_tokens": real & ~mask}
        values = {"ppl": (ppl, "n_seqs"), "loss": (loss, "n_valid_tokens")}
        if tokens.entropy is not None:
            values["entropy"] = tokens.entropy, "n_valid_tokens"
        if tokens.min_logits is not None and tokens.max_logits is not None:
            values["vocab_min_logits"] = tokens.min_logits, "n_tokens"
            values["vocab_max_logits"] = tokens.max_logits, "n_tokens"
        return cls.over(counts, values)


@named
def linear_sft_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    mask: Tensor,
    real: Tensor,
    sequence: Tensor,
    sequences: int,
    valid_tokens: Tensor | float,
    reduction: Literal["mean", "sum"] = "mean",
    epsilon: float = 0.0,
    entropy: bool = True,
    logit_range: bool = True,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab_start: int | None = None,
    vocab_rows: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    layout: TokenLayout = "bsh",
    matmul_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, SFTStatistics]:
    """Computes the SFT loss and its statistics from this rank's tokens of a pack.

    Results do not depend on how tokens are split and padded. The statistics are those of AReaL.

    Args:
        hidden: ``[tokens, hidden]``, or a batch as ``layout`` says; see ``linear_logprobs``.
        weight: ``[local_vocab, hidden]``, this rank's rows of the lm-head.
        labels: ``[tokens]``, or ``[B, S]`` for a batch: integer ids, shifted before the pack was
            split; see ``Pack.labels``. Labels that are not trained may be anything.
        mask: bool or 0 and 1, of the shape of the labels: the label is trained.
        real: bool or 0 and 1, of the shape of the labels: the token is not padding.
        sequence: integers below ``sequences``, of the shape of the labels: each token's sequence.
        sequences: the number of sequences in the pack.
        valid_tokens: the number of trained tokens in the whole batch, over every data- and
            context-parallel rank and microbatch.
        reduction: ``"mean"`` divides by ``valid_tokens``; ``"sum"`` does not.
        epsilon: added to ``valid_tokens``; 1e-5 in AReaL.
        entropy: whether the statistics have the entropy. It reads every logit again, which takes
            time at small hidden sizes.
        logit_range: whether the statistics have the range of logits.
        bias: ``[local_vocab]``, or None.
        temperature: divides the logits; positive.
        softcap: the cap of the logits, positive; None for no soft-cap.
        vocab_start: id in the whole vocabulary of this rank's first row.
        vocab_rows: number of leading rows that belong to the vocabulary; all by default.
        tp_group: the ranks among which the vocabulary is split.
        cp_group: the ranks over which the tokens of sequences are split.
        sequence_parallel: whether each rank of ``tp_group`` holds only its part of the tokens.
        layout: order of the dims of hidden; see ``flatten_tokens``. ``"sbh"`` is Megatron's.
        matmul_dtype: dtype of matrix products; see ``linear_logprobs``.
        chunk: number of tokens whose logits exist at a time.

    Returns:
        The loss, a scalar in nats, and the statistics. Both are this rank's parts. Losses and
        gradients add up over dp, cp and microbatches; a trainer that averages over ranks must
        multiply by their number. Add the statistics of microbatches up, then ``reduce`` once: see
        ``Metrics``.

    Raises:
        ValueError: A shape or option does not fit; the message names it.

    Collectives:
        Those of ``linear_logprobs`` over ``tp_group``, and one all-reduce SUM of
        ``[2, sequences]`` over ``cp_group``, always.
    """
    given = {"mask": as_mask("mask", mask, labels, "labels"), "real": as_mask("real", real, labels, "labels")}
    given["sequence"] = sequence
    mask, real, sequence = (flatten_like(name, x, labels, layout) for name, x in given.items())
    hidden, labels, _ = flatten_tokens(hidden, labels, layout, ranks_of_tokens(sequence_parallel, tp_group))
    check_choice("reduction", reduction, ("mean", "sum"))
    check_setting("epsilon", epsilon, least=0)
    check_integer("sequences", sequences, least=0)
    tokens = linear_logprobs(
        hidden,
        weight,
        as_labels_of(mask, labels),
        bias=bias,
        ignore_index=UNTRAINED,
        temperature=temperature,
        softcap=softcap,
        entropy=entropy,
        logit_range=logit_range,
        vocab_start=vocab_start,
        vocab_rows=vocab_rows,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        matmul_dtype=matmul_dtype,
        chunk=chunk,
    )
    statistics = SFTStatistics.of(
        tokens, mask=mask, real=real, sequence=sequence, sequences=sequences, cp_group=cp_group
    )
    loss = -torch.where(mask, tokens.logprobs, 0.0).sum()
    if reduction == "mean":
        loss = loss / divisor(as_count("valid_tokens", valid_tokens, loss, mask.sum()), epsilon)
    return loss, statistics
