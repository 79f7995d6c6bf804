# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihood of the labels: the loss of supervised fine-tuning.

    mean:  L = - sum_t m_t log p(y_t) / N        sum:  L = - sum_t m_t log p(y_t)

with N the number of trained tokens of the *whole* batch, over every rank and microbatch, so that the losses and
gradients of parts add up to those of the batch (NeMo-RL ``global_valid_toks``, Megatron-LM per-token loss).
"""

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import divide, select, sequence_mean, sequence_sum, token_mean

Reduction = Literal["mean", "sum"]


def nll(
    logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
    reduction: Reduction = "mean",
    epsilon: float = 0.0,
) -> Float[Tensor, ""]:
    """The loss, a scalar in nats (per token for ``"mean"``).

    Masked tokens are selected away, never multiplied by zero, so that NaN or inf there does no harm. A batch
    without a single trained token has loss 0, with zero gradient. ``epsilon`` is added to N in the mean: 0 divides by
    max(N, 1); 1e-8 in NeMo-RL, 1e-5 in AReaL, which makes its loss smaller by a factor of N / (N + 1e-5).
    """
    total = -select(mask, logprobs).sum()
    return total if reduction == "sum" else divide(total, valid_tokens, epsilon)


def sequence_nll(
    logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    sequence: Int[Tensor, " tokens"],
    sequences: int,
    average: bool = False,
) -> Float[Tensor, " sequences"]:
    """The loss of each sequence, not reduced over them: ``- sum_t m_t log p(y_t)``, ``average`` divides it by the sequence's trained tokens.

    0 for a sequence without any. NeMo-RL's ``NLLLoss`` with ``dpo_loss``, and ``dpo_average_log_probs`` for the average: the SFT term of DPO.
    """
    if average:
        return -sequence_mean(logprobs, mask, sequence, sequences)
    return -sequence_sum(select(mask, logprobs), sequence, sequences)


def mean_entropy(
    entropy: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
) -> Float[Tensor, ""]:
    """``sum_t m_t H_t / N``, a metric in nats per trained token; 0 for a batch without one."""
    return token_mean(entropy, mask, valid_tokens)
