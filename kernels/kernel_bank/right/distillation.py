# SPDX-License-Identifier: Apache-2.0
"""Distillation: over the whole vocabulary, spec ``divergence``, and over a teacher's top-k, spec
``distill``.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bank.right.formats import COARSE_LOGITS, DOUBLE, LOW, TRAINED
from kernel_bank.right.kernel import Batch, of_scores, of_tokens, selected_sum, sum_of_sequences
from kernel_bank.right.logprobs import Scores, above_zero
from kernel_bank.right.loops import IN_FORWARD, RECOMPUTED
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY

# Ways to write KL(a || b) of log-probabilities ``[tokens, n]``


def kl_of_differences(log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a (log a - log b)."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def kl_in_two_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a log a - sum a log b."""
    a = log_a.exp()
    return (a * log_a).sum(-1) - (a * log_b).sum(-1)


def kl_by_torch(log_a: Tensor, log_b: Tensor) -> Tensor:
    return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)


def kl_of_probabilities(log_a: Tensor, log_b: Tensor) -> Tensor:
    """F.kl_div of a target that is no logarithm: a log a - a log b, term by term."""
    return F.kl_div(log_b, above_zero(log_a.exp()), reduction="none").sum(-1)


KLS = (kl_of_differences, kl_in_two_terms, kl_by_torch, kl_of_probabilities)


# The whole vocabulary


def _both(s: Scores, batch: Batch, options: Any) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of teacher and student."""
    teacher = batch["teacher_logits"] / options.temperature
    return torch.log_softmax(teacher, -1), torch.log_softmax(s.logits, -1)


def mixture_by_logaddexp(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    weights = torch.tensor([beta, 1 - beta], dtype=log_p.dtype).log()
    return torch.logaddexp(log_p + weights[0], log_q + weights[1])


def mixture_by_logsumexp(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """As TRL."""
    weight = torch.tensor(beta, dtype=log_p.dtype)
    return torch.logsumexp(torch.stack([log_p + weight.log(), log_q + (1 - weight).log()]), 0)


def mixture_of_probabilities(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """As Liger: the logarithm of b p + (1 - b) q."""
    return above_zero(beta * log_p.exp() + (1 - beta) * log_q.exp()).log()


def _divergence(kl: Any, mixture: Any) -> Any:
    def loss(s: Scores, batch: Batch, options: Any) -> Tensor:
        log_p, log_q = _both(s, batch, options)
        if options.divergence_type == "forward":
            return kl(log_p, log_q)
        if options.divergence_type == "reverse":
            return kl(log_q, log_p)
        log_r = mixture(log_p, log_q, options.beta)
        return options.beta * kl(log_p, log_r) + (1 - options.beta) * kl(log_q, log_r)

    return of_scores(loss)


def divergence_of_entropies(s: Scores, batch: Batch, options: Any) -> Tensor:
    """Cross-entropy less entropy; a Jensen-Shannon divergence is an entropy less two."""
    log_p, log_q = _both(s, batch, options)
    p, q = log_p.exp(), log_q.exp()
    if options.divergence_type == "forward":
        return -(p * log_q).sum(-1) + (p * log_p).sum(-1)
    if options.divergence_type == "reverse":
        return (q * log_q).sum(-1) - (q * log_p).sum(-1)
    r = options.beta * p + (1 - options.beta) * q
    inside = options.beta * (p * log_p).sum(-1) + (1 - options.beta) * (q * log_q).sum(-1)
    return inside - (r * above_zero(r).log()).sum(-1)


def parallel_divergence(s: Scores, batch: Batch, options: Any) -> Tensor:
    """Parallel over the vocabulary."""
    teacher = batch["teacher_logits"] / options.temperature
    log_p, log_q = s.vocab.log_softmax(teacher), s.vocab.log_softmax(s.logits)
    if options.divergence_type == "forward":
        return s.vocab.sum(log_p.exp() * (log_p - log_q))
    if options.divergence_type == "reverse":
        return s.vocab.sum(log_q.exp() * (log_q - log_p))
    log_r = mixture_by_logaddexp(log_p, log_q, options.beta)
    to_teacher = s.vocab.sum(log_p.exp() * (log_p - log_r))
    return options.beta * to_teacher + (1 - options.beta) * s.vocab.sum(log_q.exp() * (log_q - log_r))


def divergences() -> Iterator[Candidate]:
    given: dict[str, Any] = {"supports": {"divergence_type": ANY, "beta": ANY}}
    mixtures = (mixture_by_logaddexp, mixture_by_logsumexp, mixture_of_probabilities, mixture_by_logaddexp)
    for kl, mixture in zip(KLS, mixtures, strict=True):
        write = _divergence(kl, mixture)
        yield of_tokens(kl.__name__, "divergence", "hidden", write, formats=TRAINED, **given)
        yield of_tokens(kl.__name__, "divergence", "logits", write, **given)
    entropies = of_scores(divergence_of_entropies)
    yield of_tokens("entropies", "divergence", "logits", entropies, **given)
    yield of_tokens("entropies", "divergence", "logits", entropies, formats=DOUBLE, **given)
    torchs = _divergence(kl_by_torch, mixture_by_logsumexp)
    yield of_tokens("recomputed", "divergence", "hidden", torchs, loop=RECOMPUTED, total=selected_sum, **given)
    yield of_tokens("in_forward", "divergence", "hidden", torchs, loop=IN_FORWARD, total=sum_of_sequences, **given)
    yield of_tokens("by_torch", "divergence", "logits", torchs, formats=LOW, **given)
    yield of_tokens("by_torch", "divergence", "hidden", torchs, formats=COARSE_LOGITS, **given)
    parallel = of_scores(parallel_divergence)
    yield of_tokens("parallel", "divergence", "hidden", parallel, parallel=True, formats=TRAINED, **given)
    yield of_tokens("parallel", "divergence", "logits", parallel, parallel=True, **given)


# A teacher's top-k


def softmax_of_gathered(s: Scores, ids: Tensor) -> Tensor:
    """Returns the student's log-probabilities of the top-k, renormalised: of their logits."""
    return torch.log_softmax(s.logits.gather(1, ids), -1)


def renormalised_softmax(s: Scores, ids: Tensor) -> Tensor:
    """The same from the log-probabilities in the whole vocabulary."""
    gathered = torch.log_softmax(s.logits, -1).gather(1, ids)
    return gathered - gathered.logsumexp(-1, keepdim=True)


def gathered_less_logsumexp(s: Scores, ids: Tensor) -> Tensor:
    """The same, with a normaliser that is computed apart."""
    gathered = s.logits.gather(1, ids)
    return gathered - torch.logsumexp(gathered, -1, keepdim=True)


def _tail_over_vocabulary(s: Scores, ids: Tensor, infinitesimal: float) -> Tensor:
    """sum over the tokens outside of q (log q - c), term by term."""
    log_q = torch.log_softmax(s.logits, -1)
    outside = torch.ones_like(log_q, dtype=torch.bool).scatter(1, ids, False)
    return torch.where(outside, log_q.exp() * (log_q - infinitesimal), 0.0).sum(-1)


def _tail_of_rests(s: Scores, ids: Tensor, infinitesimal: float) -> Tensor:
    """As NeMo-RL: H_rest - c P_rest, where each is that of all tokens less that of the top-k."""
    log_q = torch.log_softmax(s.logits, -1)
    inside = log_q.gather(1, ids)
    rest = (log_q.exp() * log_q).sum(-1) - (inside.exp() * inside).sum(-1)
    return rest - infinitesimal * (1 - inside.exp().sum(-1))


def _tail_of_entropy(s: Scores, ids: Tensor, infinitesimal: float) -> Tensor:
    """-H - c - sum over the top-k of q (log q - c), with the entropy H as lse - <q, z>."""
    log_q = s.logits - torch.logsumexp(s.logits, -1, keepdim=True)
    entropy = torch.logsumexp(s.logits, -1) - (log_q.exp() * s.logits).sum(-1)
    inside = log_q.gather(1, ids)
    return -entropy - infinitesimal - (inside.exp() * (inside - infinitesimal)).sum(-1)


def _distill(kl: Any, renormalised: Any, tail: Any) -> Any:
    def loss(s: Scores, batch: Batch, options: Any) -> Tensor:
        ids = batch["teacher_indices"]
        log_p = torch.log_softmax(batch["teacher_logits"] / options.temperature, -1)
        rest: Any = 0.0
        if options.zero_outside_topk:
            log_q = torch.log_softmax(s.logits, -1).gather(1, ids)
            if options.kl_type != "forward":
                rest = tail(s, ids, options.log_infinitesimal)
        else:
            log_q = renormalised(s, ids)
        if options.kl_type == "forward":
            return kl(log_p, log_q)
        reverse = kl(log_q, log_p) + rest
        if options.kl_type == "reverse":
            return reverse
        return options.mixed_kl_weight * kl(log_p, log_q) + (1 - options.mixed_kl_weight) * reverse

    return of_scores(loss)


def distillations() -> Iterator[Candidate]:
    names = ("kl_type", "mixed_kl_weight", "zero_outside_topk", "log_infinitesimal")
    given: dict[str, Any] = {"supports": dict.fromkeys(names, ANY)}
    students = (softmax_of_gathered, renormalised_softmax, gathered_less_logsumexp, softmax_of_gathered)
    tails = (_tail_over_vocabulary, _tail_of_rests, _tail_of_entropy, _tail_of_rests)
    for kl, student, tail in zip(KLS, students, tails, strict=True):
        write = _distill(kl, student, tail)
        yield of_tokens(kl.__name__, "distill", "hidden", write, formats=TRAINED, **given)
        yield of_tokens(kl.__name__, "distill", "logits", write, **given)
    usual = _distill(kl_of_differences, softmax_of_gathered, _tail_over_vocabulary)
    yield of_tokens("usual", "distill", "logits", usual, formats=DOUBLE, total=sum_of_sequences, **given)
    yield of_tokens("usual", "distill", "logits", usual, formats=LOW, **given)
    yield of_tokens("usual", "distill", "hidden", usual, formats=COARSE_LOGITS, **given)
    yield of_tokens("recomputed", "distill", "hidden", usual, loop=RECOMPUTED, total=selected_sum, **given)
    yield of_tokens("in_forward", "distill", "hidden", usual, loop=IN_FORWARD, **given)


KERNELS = (*divergences(), *distillations())
