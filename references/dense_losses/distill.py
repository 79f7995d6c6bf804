# SPDX-License-Identifier: Apache-2.0
"""Distillation: the Kullback-Leibler divergence to a teacher whose top-k logits alone are known.

Symbols: z student logits, y_1..y_k the teacher's top-k tokens, u their teacher logits, tau
temperature, m the mask of trained tokens.

    log p = log_softmax(u / tau)                 the teacher, over its k tokens
    log q = log_softmax(z[y_1..y_k] / tau)       the student, renormalised over the same k tokens
            log_softmax(z / tau)[y_1..y_k]       with zero_outside_topk: not renormalised

    forward  F = sum_k p (log p - log q)
    reverse  R = sum_k q (log q - log p) + tail
          tail = sum_{v outside} q_v (log q_v - log_infinitesimal)    with zero_outside_topk, else 0
    mixed    w F + (1 - w) R                                          w = mixed_kl_weight

    L = sum_t m_t KL_t / N                       N: trained tokens of the whole batch

``zero_outside_topk`` stands for a teacher that gives no probability to tokens outside its top-k.
Their terms in F are 0, since 0 log 0 = 0. R would be infinite, so in R the teacher gives each of
them the probability exp(log_infinitesimal). NeMo-RL writes the tail as ``H_rest + 100 P_rest``,
where its ``H_all`` is sum_v q_v log q_v, the negative of an entropy. With ``zero_outside_topk``, F
of a student whose logits are the teacher's is -log q(top-k), not 0.

Source: NeMo-RL ``DistillationLossFn`` and ``get_distillation_topk_logprobs_from_logits``.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dense_losses.reductions import token_mean


def distill(
    *,
    logits: Float[Tensor, "tokens vocab"],
    teacher_logits: Float[Tensor, "tokens k"],
    teacher_indices: Int[Tensor, "tokens k"],
    mask: Bool[Tensor, " tokens"],
    valid_tokens: Int[Tensor, ""],
    options: Any,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Computes the distillation loss and its metrics.

    Args:
        logits: z ``[tokens, vocab]``, of the student. The loss is differentiable in it.
        teacher_logits: u ``[tokens, k]``.
        teacher_indices: y_1..y_k ``[tokens, k]``, indices into the vocabulary, distinct within a
            token.
        mask: m ``[tokens]``, true at trained tokens.
        valid_tokens: N, the number of trained tokens over every rank and microbatch.
        options: The options of ``lossgate.options.DistillOptions``, as attributes.

    Returns:
        The loss, in nats per trained token, and the metrics, which ranks sum and which carry no
        gradient: ``loss``, and ``num_unmasked_tokens``, the number of trained tokens on this rank.
        NeMo-RL reports a ``num_valid_samples`` instead, which counts the rows of the batch, even
        those that its ``sample_mask`` drops.
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
    options: Any,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Computes ``sum_t m_t KL_t / N`` and the metrics, the last stage of ``distill``.

    Args:
        token_kl: KL ``[tokens]``, in nats, from ``distill_token_kl`` or ``topk_kl``.
        mask: m ``[tokens]``, true at trained tokens.
        valid_tokens: N, the number of trained tokens over every rank and microbatch.
        options: Option ``epsilon``, as an attribute.

    Returns:
        The loss and the metrics of ``distill``.
    """
    loss = token_mean(token_kl, mask, valid_tokens, options.epsilon)
    return loss, {"loss": loss.detach(), "num_unmasked_tokens": mask.to(token_kl.dtype).sum()}


def distill_token_kl(
    logits: Float[Tensor, "tokens vocab"],
    teacher_logits: Float[Tensor, "tokens k"],
    teacher_indices: Int[Tensor, "tokens k"],
    options: Any,
) -> Float[Tensor, " tokens"]:
    """Computes the divergence of each token from the logits: all stages before the reduction.

    Args:
        logits: z ``[tokens, vocab]``, of the student.
        teacher_logits: u ``[tokens, k]``.
        teacher_indices: y_1..y_k ``[tokens, k]``.
        options: The options of ``lossgate.options.DistillOptions``, as attributes.

    Returns:
        KL ``[tokens]``, in nats.
    """
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
    """Computes ``log q``, the student's log-probabilities of the teacher's top-k tokens.

    Args:
        logits: z ``[tokens, vocab]``.
        teacher_indices: y_1..y_k ``[tokens, k]``.
        temperature: tau, a positive number.
        zero_outside_topk: Whether probabilities are those in the whole vocabulary. If not, they are
            renormalised over the k tokens.

    Returns:
        ``[tokens, k]``, in nats.
    """
    if zero_outside_topk:
        return torch.log_softmax(logits / temperature, dim=-1).gather(-1, teacher_indices)
    return torch.log_softmax(logits.gather(-1, teacher_indices) / temperature, dim=-1)


def teacher_topk_logprobs(
    teacher_logits: Float[Tensor, "tokens k"], temperature: float = 1.0
) -> Float[Tensor, "tokens k"]:
    """Computes ``log p``, the teacher's log-probabilities of its top-k tokens.

    They are renormalised over the k tokens, also with ``zero_outside_topk``.

    Args:
        teacher_logits: u ``[tokens, k]``.
        temperature: tau, a positive number.

    Returns:
        ``[tokens, k]``, in nats.
    """
    return torch.log_softmax(teacher_logits / temperature, dim=-1)


def student_tail_kl(
    logits: Float[Tensor, "tokens vocab"],
    teacher_indices: Int[Tensor, "tokens k"],
    temperature: float = 1.0,
    log_infinitesimal: float = -100.0,
) -> Float[Tensor, " tokens"]:
    """Computes the tail, ``sum_{v outside} q_v (log q_v - log_infinitesimal)``.

    Args:
        logits: z ``[tokens, vocab]``.
        teacher_indices: y_1..y_k ``[tokens, k]``.
        temperature: tau, a positive number.
        log_infinitesimal: The teacher's log-probability of each token outside its top-k, in nats.

    Returns:
        The reverse KL outside the top-k ``[tokens]``, in nats; 0 if k is the whole vocabulary.
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    outside = torch.ones_like(logits, dtype=torch.bool).scatter(
        -1, teacher_indices, torch.zeros_like(teacher_indices, dtype=torch.bool)
    )
    return _kl(torch.where(outside, logprobs, -torch.inf), torch.full_like(logprobs, log_infinitesimal))


def topk_kl(
    student: Float[Tensor, "tokens k"],
    teacher: Float[Tensor, "tokens k"],
    tail: Float[Tensor, " tokens"],
    options: Any,
) -> Float[Tensor, " tokens"]:
    """Computes the divergence of each token from the log-probabilities of the top-k.

    Args:
        student: log q ``[tokens, k]``, in nats.
        teacher: log p ``[tokens, k]``, in nats.
        tail: The part of the reverse KL outside the top-k ``[tokens]``, in nats.
        options: The options of ``lossgate.options.DistillOptions``, as attributes.

    Returns:
        KL ``[tokens]``, in nats.
    """
    if options.kl_type == "forward":
        return _kl(teacher, student)
    reverse = _kl(student, teacher) + tail
    return (
        reverse
        if options.kl_type == "reverse"
        else options.mixed_kl_weight * _kl(teacher, student) + (1 - options.mixed_kl_weight) * reverse
    )


def _kl(logp: Float[Tensor, "tokens n"], logq: Float[Tensor, "tokens n"]) -> Float[Tensor, " tokens"]:
    """Computes ``sum_v p_v (log p_v - log q_v)``, where 0 log 0 = 0.

    p_v is 0 for tokens of a padded vocabulary, whose logits are -inf.
    """
    possible = logp > -torch.inf
    logp = torch.where(possible, logp, 0.0)  # before the product, or its gradient would be NaN
    return torch.where(possible, logp.exp() * (logp - logq), 0.0).sum(dim=-1)
