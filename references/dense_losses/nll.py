# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihood of the labels: the loss of supervised fine-tuning.

    mean:  L = - sum_t m_t log p(y_t) / N        sum:  L = - sum_t m_t log p(y_t)

with N the number of trained tokens of the *whole* batch, over every rank and microbatch, so that the losses and
gradients of parts add up to those of the batch (NeMo-RL ``global_valid_toks``, Megatron-LM per-token loss).
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Reduction = Literal["mean", "sum"]


def nll(
    logprobs: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
    reduction: Reduction = "mean",
) -> Float[Tensor, ""]:
    """The loss, a scalar in nats (per token for ``"mean"``).

    Masked tokens are selected away, never multiplied by zero, so that NaN or inf there does no harm. A batch
    without a single trained token has loss 0, with zero gradient.
    """
    total = -torch.where(mask, logprobs, 0.0).sum()
    return total if reduction == "sum" else total / valid_tokens.clamp(min=1)


def mean_entropy(
    entropy: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
) -> Float[Tensor, ""]:
    """``sum_t m_t H_t / N``, a metric in nats per trained token; 0 for a batch without one."""
    return torch.where(mask, entropy, 0.0).sum() / valid_tokens.clamp(min=1)
