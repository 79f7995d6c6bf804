# SPDX-License-Identifier: Apache-2.0
"""The stages in front of every loss: hidden states, logits, log-probabilities and entropies.

Symbols: h hidden state, W output embedding (lm-head), b bias, z logits, y label, tau temperature.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def linear_logits(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    bias: Float[Tensor, " vocab"] | None = None,
) -> Float[Tensor, "tokens vocab"]:
    """Computes ``z = h W^T + b``, the output layer of a language model.

    Args:
        hidden: h ``[tokens, hidden]``.
        weight: W ``[vocab, hidden]``.
        bias: b ``[vocab]``; None for an output layer without one.

    Returns:
        z ``[tokens, vocab]``.
    """
    logits = hidden @ weight.T
    return logits if bias is None else logits + bias


def softcapped(logits: Float[Tensor, "tokens vocab"], softcap: float) -> Float[Tensor, "tokens vocab"]:
    """Computes ``softcap tanh(z / softcap)``, the soft-cap of logits in Gemma 2 (arXiv 2408.00118).

    Args:
        logits: z ``[tokens, vocab]``.
        softcap: The bound of the result, a positive number.

    Returns:
        ``[tokens, vocab]``.
    """
    return softcap * torch.tanh(logits / softcap)


def token_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    temperature: float = 1.0,
) -> Float[Tensor, " tokens"]:
    """Computes ``log p(y) = z_y / tau - log sum_v exp(z_v / tau)``.

    The temperature divides the logits, before the softmax. Dividing log-probabilities by it gives
    numbers that no longer sum to one (NeMo-RL's fused path and prime-rl #697 did that).

    Args:
        logits: z ``[tokens, vocab]``.
        labels: y ``[tokens]``, indices into the vocabulary.
        temperature: tau, a positive number.

    Returns:
        The log-probability of each label ``[tokens]``, in nats.
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, labels[:, None]).squeeze(-1)


def token_entropy(logits: Float[Tensor, "tokens vocab"], temperature: float = 1.0) -> Float[Tensor, " tokens"]:
    """Computes ``H = - sum_v p_v log p_v`` of the tempered distribution ``p = softmax(z / tau)``.

    Args:
        logits: z ``[tokens, vocab]``, finite.
        temperature: tau, a positive number.

    Returns:
        The entropy of each token's distribution ``[tokens]``, in nats.
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
