# SPDX-License-Identifier: Apache-2.0
"""Distillation: Kullback-Leibler divergence to a teacher of whom only the top-k logits are known.

Symbols: z student logits, y_1..y_k the teacher's top-k tokens, u their teacher logits, tau temperature.

    log p = log_softmax(u / tau)                            the teacher, over its k tokens
    log q = log_softmax(z[y_1..y_k] / tau)                  the student, renormalised over the same k tokens
            log_softmax(z / tau)[y_1..y_k]                  with zero_outside_topk: its share of the whole vocabulary

    forward  F = sum_k p (log p - log q)
    reverse  R = sum_k q (log q - log p)  [+ sum_{v outside} q_v (log q_v - log_infinitesimal) with zero_outside_topk]
    mixed    w F + (1 - w) R                                w = mixed_kl_weight

    L = sum_t m_t KL_t / N                                  N: trained tokens of the whole batch

``zero_outside_topk`` means a teacher that gives the tokens outside its top-k no probability. F does not see those: 0 log 0 = 0.
R would be infinite, so there they get the probability exp(-100). NeMo-RL writes that as ``H_rest + 100 P_rest``, where its ``H_all``
is sum_v q_v log q_v, the negative of an entropy. At student = teacher F is then -log q(top-k), not 0.
Source: NeMo-RL ``DistillationLossFn`` and ``get_distillation_topk_logprobs_from_logits``.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import token_mean


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """The divergence."""

    kl_type: Literal["forward", "reverse", "mixed"] = "forward"
    """``"forward"`` KL(teacher || student), ``"reverse"`` KL(student || teacher), or a weighted mean of both, ``"mixed"``."""

    mixed_kl_weight: float = 0.5
    """The weight of the forward KL in ``"mixed"``, in [0, 1]; the reverse KL has the rest."""

    zero_outside_topk: bool = False
    """Compare with the student's probabilities in the whole vocabulary; else both are renormalised over the teacher's top-k."""

    log_infinitesimal: float = -100.0
    """In nats: the teacher's log-probability of each token outside its top-k, in the reverse KL with ``zero_outside_topk``."""

    temperature: float = 1.0
    """Divides the student's and the teacher's logits. NeMo-RL's is that of generation, applied by the workers; there is no factor tau^2."""

    epsilon: float = 0.0
    """Added to the token count in the denominator: 1e-8 in NeMo-RL (``masked_mean``)."""

    def __post_init__(self) -> None:
        if self.kl_type not in ("forward", "reverse", "mixed"):
            raise ValueError(f'kl_type is {self.kl_type!r}; expected "forward", "reverse" or "mixed"')
        if not 0 <= self.mixed_kl_weight <= 1:
            raise ValueError(f"mixed_kl_weight is {self.mixed_kl_weight}; expected a weight in [0, 1]")
        if not -math.inf < self.log_infinitesimal < 0:
            raise ValueError(
                f"log_infinitesimal is {self.log_infinitesimal}; expected a finite log-probability below 0"
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; expected a positive number")
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"epsilon is {self.epsilon}; expected a number that is not negative")


def distill(
    *,
    logits: Float[Tensor, "tokens vocab"],
    teacher_logits: Float[Tensor, "tokens k"],
    teacher_indices: Int[Tensor, "tokens k"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
    options: DistillOptions,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The loss in nats per trained token, differentiable in ``logits``; the k teacher indices of a token are distinct.

    Metrics, which carry no gradient, both summed over ranks: ``loss``; ``num_unmasked_tokens``, the trained tokens here. NeMo-RL reports a
    ``num_valid_samples`` instead, which counts the rows of the batch, even those that its ``sample_mask`` drops.
    """
    rows = mask[:, None]
    token_kl = distill_token_kl(
        torch.where(rows, logits, 0.0),
        torch.where(rows, teacher_logits, 0.0),
        torch.where(rows, teacher_indices, 0),
        options,
    )
    return distill_mean(token_kl, mask, valid_tokens, options)


def distill_mean(
    token_kl: Float[Tensor, " tokens"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
    options: DistillOptions,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """``sum_t m_t KL_t / N`` and the metrics: the last stage of ``distill``."""
    loss = token_mean(token_kl, mask, valid_tokens, options.epsilon)
    return loss, {"loss": loss.detach(), "num_unmasked_tokens": mask.to(token_kl.dtype).sum()}


def distill_token_kl(
    logits: Float[Tensor, "tokens vocab"],
    teacher_logits: Float[Tensor, "tokens k"],
    teacher_indices: Int[Tensor, "tokens k"],
    options: DistillOptions,
) -> Float[Tensor, " tokens"]:
    """The divergence of each token in nats, from the logits: all stages before the reduction."""
    student = student_topk_logprobs(logits, teacher_indices, options.temperature, options.zero_outside_topk)
    teacher = teacher_topk_logprobs(teacher_logits, options.temperature)
    if not options.zero_outside_topk:
        return topk_kl(student, teacher, torch.zeros_like(student[:, 0]), options)
    tail = student_tail_kl(logits, teacher_indices, options.temperature, options.log_infinitesimal)
    return topk_kl(student, teacher, tail, options)


def student_topk_logprobs(
    logits: Float[Tensor, "tokens vocab"],
    teacher_indices: Int[Tensor, "tokens k"],
    temperature: float = 1.0,
    zero_outside_topk: bool = False,
) -> Float[Tensor, "tokens k"]:
    """``log q`` of the teacher's tokens: in the whole vocabulary with ``zero_outside_topk``, else renormalised over the k."""
    if zero_outside_topk:
        return torch.log_softmax(logits / temperature, dim=-1).gather(-1, teacher_indices)
    return torch.log_softmax(logits.gather(-1, teacher_indices) / temperature, dim=-1)


def teacher_topk_logprobs(
    teacher_logits: Float[Tensor, "tokens k"], temperature: float = 1.0
) -> Float[Tensor, "tokens k"]:
    """``log p``, renormalised over the k in either mode."""
    return torch.log_softmax(teacher_logits / temperature, dim=-1)


def student_tail_kl(
    logits: Float[Tensor, "tokens vocab"],
    teacher_indices: Int[Tensor, "tokens k"],
    temperature: float = 1.0,
    log_infinitesimal: float = -100.0,
) -> Float[Tensor, " tokens"]:
    """``sum_{v outside} q_v (log q_v - log_infinitesimal)``, the reverse KL outside the top-k; 0 if k is the whole vocabulary."""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    outside = torch.ones_like(logits, dtype=torch.bool).scatter(
        -1, teacher_indices, torch.zeros_like(teacher_indices, dtype=torch.bool)
    )
    return _kl(torch.where(outside, logprobs, -torch.inf), torch.full_like(logprobs, log_infinitesimal))


def topk_kl(
    student: Float[Tensor, "tokens k"],
    teacher: Float[Tensor, "tokens k"],
    tail: Float[Tensor, " tokens"],
    options: DistillOptions,
) -> Float[Tensor, " tokens"]:
    """The divergence of each token from the log-probabilities of the top-k; ``tail`` belongs to the reverse KL."""
    if options.kl_type == "forward":
        return _kl(teacher, student)
    reverse = _kl(student, teacher) + tail
    return (
        reverse
        if options.kl_type == "reverse"
        else options.mixed_kl_weight * _kl(teacher, student) + (1 - options.mixed_kl_weight) * reverse
    )


def _kl(logp: Float[Tensor, "tokens n"], logq: Float[Tensor, "tokens n"]) -> Float[Tensor, " tokens"]:
    """``sum_v p_v (log p_v - log q_v)``, where 0 log 0 = 0: a padded vocabulary has logits of -inf."""
    possible = logp > -torch.inf
    logp = torch.where(possible, logp, 0.0)  # before the product, whose gradient would be NaN
    return torch.where(possible, logp.exp() * (logp - logq), 0.0).sum(dim=-1)
