# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihood of the labels: the loss of supervised fine-tuning.

    mean:  L = - sum_t m_t log p(y_t) / N        sum:  L = - sum_t m_t log p(y_t)

m is the mask of trained tokens. N is the number of trained tokens of the *whole* batch, over every
rank and microbatch, so that the losses and gradients of parts add up to those of the batch.

Source: NeMo-RL ``NLLLoss`` (N is its ``global_valid_toks``); Megatron-LM's per-token loss.
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
    """Computes the negative log-likelihood of the trained tokens.

    Masked tokens are selected away, and not multiplied by zero, so that NaN or inf in them has no
    effect.

    Args:
        logprobs: log p(y) ``[tokens]``, in nats. The loss is differentiable in it.
        mask: m ``[tokens]``, true at trained tokens.
        valid_tokens: N, a scalar.
        reduction: ``"mean"`` divides by N, ``"sum"`` does not.
        epsilon: Added to N in the mean. At 0 the mean divides by max(N, 1). It is 1e-8 in NeMo-RL
            and 1e-5 in AReaL, whose loss is therefore smaller by a factor of N / (N + 1e-5).

    Returns:
        L, a scalar in nats (nats per trained token for ``"mean"``). It is 0, with zero gradient,
        for a batch without a trained token.
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
    """Computes ``- sum_t m_t log p(y_t)`` over the tokens of each sequence.

    It is the SFT term of DPO: NeMo-RL's ``NLLLoss`` with ``dpo_loss``, and with
    ``dpo_average_log_probs`` for the average.

    Args:
        logprobs: log p(y) ``[tokens]``, in nats. The result is differentiable in it.
        mask: m ``[tokens]``, true at trained tokens.
        sequence: ``[tokens]``, the number of the sequence that each token belongs to.
        sequences: The number of sequences.
        average: Whether to divide by the number of trained tokens of each sequence.

    Returns:
        The loss of each sequence ``[sequences]``, in nats; 0 for one without a trained token.
    """
    if average:
        return -sequence_mean(logprobs, mask, sequence, sequences)
    return -sequence_sum(select(mask, logprobs), sequence, sequences)


def mean_entropy(
    entropy: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
) -> Float[Tensor, ""]:
    """Computes the metric ``sum_t m_t H_t / N``.

    Args:
        entropy: H ``[tokens]``, in nats.
        mask: m ``[tokens]``, true at trained tokens.
        valid_tokens: N, the number of trained tokens of the whole batch.

    Returns:
        A scalar in nats per trained token; 0 for a batch without one.
    """
    return token_mean(entropy, mask, valid_tokens)
