# SPDX-License-Identifier: Apache-2.0
"""The stages in front of every loss: hidden states -> logits -> per-token log-probabilities and entropies.

Symbols: h hidden state, W output embedding (lm-head), z logits, y label, tau temperature, V vocabulary size.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def linear_logits(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None = None,
) -> Float[Tensor, "tokens vocab"]:
    """``z = h W^T + b``, the output layer of a language model."""
    logits = hidden @ weight.T
    return logits if bias is None else logits + bias


def token_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    temperature: float = 1.0,
) -> Float[Tensor, " tokens"]:
    """``log p(y) = z_y / tau - log sum_v exp(z_v / tau)``.

    The temperature divides the logits, before the softmax: dividing log-probabilities by it gives numbers that
    no longer sum to one (NeMo-RL's fused path and prime-rl #697 did that).
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, labels[:, None]).squeeze(-1)


def token_entropy(logits: Float[Tensor, "tokens vocab"], temperature: float = 1.0) -> Float[Tensor, " tokens"]:
    """``H = - sum_v p_v log p_v`` in nats, of the tempered distribution ``p = softmax(z / tau)``."""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
