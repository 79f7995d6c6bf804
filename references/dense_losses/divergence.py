# SPDX-License-Identifier: Apache-2.0
"""Divergences between two distributions over the whole vocabulary, for distillation.

Symbols: p the teacher, q the student, b a weight between 0 and 1, r = b p + (1 - b) q.

    forward   KL(p || q) = sum_v p (log p - log q)
    reverse   KL(q || p) = sum_v q (log q - log p)
    jsd       b KL(p || r) + (1 - b) KL(q || r)

Sources: the generalised Jensen-Shannon divergence is that of GKD (Agarwal et al. 2024, arXiv
2306.13649, section 2); TRL's ``GKDTrainer`` and Liger's fused linear JSD compute it too. Its
gradient does not reach q through r: sum_v r d(log r) = d(sum_v r) = 0.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

DivergenceKind = Literal["forward", "reverse", "jsd"]


def divergence(
    student: Float[Tensor, "tokens vocab"],
    teacher: Float[Tensor, "tokens vocab"],
    kind: DivergenceKind = "forward",
    beta: float = 0.5,
) -> Float[Tensor, " tokens"]:
    """Computes a divergence between the softmaxes of two sets of logits.

    Args:
        student: the logits of q ``[tokens, vocab]``, finite and after the temperature. The result
            is differentiable in them.
        teacher: the logits of p ``[tokens, vocab]``, likewise.
        kind: which divergence.
        beta: b, the weight of the teacher in ``"jsd"``, above 0 and below 1.

    Returns:
        The divergence of each token ``[tokens]``, in nats.

    Raises:
        ValueError: if ``beta`` leaves no weight for one of the two in ``"jsd"``.
    """
    if kind == "jsd" and not 0 < beta < 1:
        raise ValueError(f"beta is {beta}; expected a weight above 0 and below 1")
    log_q, log_p = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    if kind == "forward":
        return _kl(log_p, log_q)
    if kind == "reverse":
        return _kl(log_q, log_p)
    weight = student.new_full((), beta)  # a tensor, so that its logarithm rounds as in a kernel
    log_r = torch.logaddexp(log_p + weight.log(), log_q + (1 - weight).log())
    return weight * _kl(log_p, log_r) + (1 - weight) * _kl(log_q, log_r)


def _kl(log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    return (log_p.exp() * (log_p - log_q)).sum(-1)
