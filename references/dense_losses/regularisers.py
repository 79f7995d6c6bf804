# SPDX-License-Identifier: Apache-2.0
"""Terms that are added to the negative log-likelihood in pre-training and fine-tuning.

Symbols: z logits, y the label, V the size of the vocabulary, m the mask of trained tokens.

    z-loss            m lse(z)^2                      keeps the softmax's normaliser near 1
    label smoothing   m ((1 - a) (-log p(y)) + a mean_v (-log p(v)))

Sources: the z-loss is that of PaLM (Chowdhery et al. 2022, section 5), with weight 1e-4; ST-MoE
(Zoph et al. 2022) has it on the logits of its router. Label smoothing is that of Szegedy et al.
2016 (section 7), as ``torch.nn.functional.cross_entropy`` has it.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from dense_losses.reductions import select


def z_penalty(logsumexp: Float[Tensor, " tokens"], mask: Bool[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Computes ``m lse(z)^2``.

    Args:
        logsumexp: log sum_v exp(z_v) ``[tokens]``. The result is differentiable in it.
        mask: m ``[tokens]``, true at trained tokens.

    Returns:
        ``[tokens]``; 0 at tokens that are not trained.
    """
    return select(mask, logsumexp).square()


def smoothed_nll(
    logprobs: Float[Tensor, " tokens"],
    mean_logprob: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    smoothing: float,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Computes both terms of the smoothed negative log-likelihood.

    Args:
        logprobs: log p(y) ``[tokens]``, in nats. The result is differentiable in it.
        mean_logprob: the mean of log p(v) over the vocabulary ``[tokens]``; likewise. Both are
            finite where m is true.
        mask: m ``[tokens]``, true at trained tokens.
        smoothing: a, from 0 to 1.

    Returns:
        ``(1 - a) (-log p(y))`` and ``a mean_v (-log p(v))``, ``[tokens]`` each; 0 at tokens that
        are not trained.
    """
    return -(1 - smoothing) * select(mask, logprobs), -smoothing * select(mask, mean_logprob)
