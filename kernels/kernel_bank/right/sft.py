# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihoods: of the labels, with a z-loss, with smoothed labels, of bounded logits.

They are specs ``nll``, ``z_loss``, ``label_smoothing`` and ``softcap``.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bank.right.formats import COARSE_LOGITS, COARSE_LOSS, DOUBLE, LOW, LOW_LOSS, TRAINED
from kernel_bank.right.kernel import (
    Batch,
    of_scores,
    of_tokens,
    of_values,
    scaled_sum,
    selected_sum,
    sum_of_sequences,
    through,
)
from kernel_bank.right.logprobs import (
    SINGLE,
    Scores,
    cross_entropy,
    exempt_for,
    label_less_logsumexp,
    log_softmax,
    online,
    parallel_logsumexp,
    parallel_shifted,
)
from kernel_bank.right.loops import CHUNKED, IN_FORWARD, IN_FORWARD_LOW, IN_FORWARD_ROUNDED, RECOMPUTED
from lossgate.declaration.candidate import Candidate
from lossgate.declaration.supports import ANY

_NLL: dict[str, Any] = {"supports": {"reduction": ANY}}


def negative(logprobs: Tensor, batch: Batch, options: Any) -> Tensor:
    return -logprobs


def nll() -> Iterator[Candidate]:
    for name, way in SINGLE.items():
        yield of_tokens(name, "nll", "hidden", through(way, negative), formats=TRAINED, **_NLL)
        yield of_tokens(name, "nll", "logits", through(way, negative), exempt=exempt_for(way), **_NLL)
    for way in (parallel_logsumexp, parallel_shifted):
        yield of_tokens(way.__name__, "nll", "hidden", through(way, negative), parallel=True, **_NLL)
        yield of_tokens(way.__name__, "nll", "logits", through(way, negative), parallel=True, **_NLL)
    yield of_tokens(
        "parallel", "nll", "hidden", through(parallel_shifted, negative), parallel=True, formats=TRAINED, **_NLL
    )
    apart = through(label_less_logsumexp, negative, label_apart=True)
    yield of_tokens("label_apart", "nll", "hidden", apart, **_NLL)
    yield of_tokens("label_apart", "nll", "hidden", apart, formats=DOUBLE, **_NLL)
    yield of_tokens("log_softmax", "nll", "hidden", through(log_softmax, negative), formats=DOUBLE, **_NLL)
    yield of_tokens("log_softmax", "nll", "logits", through(log_softmax, negative), formats=LOW_LOSS, **_NLL)
    yield of_tokens("cross_entropy", "nll", "hidden", through(cross_entropy, negative), formats=LOW, **_NLL)
    yield of_tokens("cross_entropy", "nll", "logits", through(cross_entropy, negative), formats=LOW, **_NLL)
    yield of_tokens("log_softmax", "nll", "hidden", through(log_softmax, negative), formats=COARSE_LOGITS, **_NLL)
    yield of_tokens("online", "nll", "logits", through(online, negative), formats=COARSE_LOSS, **_NLL)
    yield from _nll_loops()
    yield of_tokens("selected", "nll", "logprobs", of_values(negative), total=selected_sum, **_NLL)
    yield of_tokens("sequences", "nll", "logprobs", of_values(negative), total=sum_of_sequences, **_NLL)
    yield of_tokens("sequences", "nll", "logprobs", of_values(negative), total=sum_of_sequences, formats=LOW, **_NLL)
    yield of_tokens("scaled", "nll", "logprobs", of_values(negative), total=scaled_sum, formats=DOUBLE, **_NLL)


def _nll_loops() -> Iterator[Candidate]:
    """Yields kernels that go over tokens chunk by chunk, as memory-saving frameworks do."""
    with_torch, fused = through(cross_entropy, negative), through(online, negative)
    yield of_tokens("chunked", "nll", "hidden", with_torch, loop=CHUNKED, total=selected_sum, **_NLL)
    yield of_tokens("recomputed", "nll", "hidden", with_torch, loop=RECOMPUTED, formats=TRAINED, **_NLL)
    yield of_tokens("recomputed", "nll", "logits", fused, loop=RECOMPUTED, total=scaled_sum, **_NLL)
    yield of_tokens("in_forward", "nll", "hidden", fused, loop=IN_FORWARD, **_NLL)
    yield of_tokens("in_forward", "nll", "logits", with_torch, loop=IN_FORWARD, total=selected_sum, **_NLL)
    rounded: dict[str, Any] = {"loop": IN_FORWARD_ROUNDED, **_NLL}
    yield of_tokens("in_forward_rounded", "nll", "hidden", with_torch, **rounded)
    yield of_tokens("in_forward_rounded", "nll", "logits", with_torch, **rounded)
    yield of_tokens("in_forward_low", "nll", "hidden", with_torch, loop=IN_FORWARD_LOW, formats=TRAINED, **_NLL)


# Z-loss


def z_of_logsumexp(s: Scores, batch: Batch, options: Any) -> Tensor:
    lse = torch.logsumexp(s.logits, -1)
    return lse - s.label() + options.z_loss_weight * lse.square()


def z_beside_cross_entropy(s: Scores, batch: Batch, options: Any) -> Tensor:
    """The normaliser is computed twice."""
    nll = F.cross_entropy(s.logits, s.labels, reduction="none")
    return nll + options.z_loss_weight * torch.logsumexp(s.logits, -1) ** 2


def z_of_shifted(s: Scores, batch: Batch, options: Any) -> Tensor:
    """log S + max, from the sum that the softmax has anyway; parallel over the vocabulary."""
    top = s.vocab.largest(s.logits)
    log_total = s.vocab.sum((s.logits - top[:, None]).exp()).log()
    lse = log_total + top
    return log_total - (s.label() - top) + options.z_loss_weight * lse * lse


# Label smoothing


def smoothed_by_torch(s: Scores, batch: Batch, options: Any) -> Tensor:
    return F.cross_entropy(s.logits, s.labels, reduction="none", label_smoothing=options.smoothing)


def smoothed_terms(s: Scores, batch: Batch, options: Any) -> Tensor:
    """As Hugging Face's label smoother: the label's log-probability, and the mean of all."""
    log_p = torch.log_softmax(s.logits, -1)
    label = log_p.gather(-1, s.labels[:, None]).squeeze(-1)
    return -(1 - options.smoothing) * label - options.smoothing * log_p.mean(-1)


def smoothed_target(s: Scores, batch: Batch, options: Any) -> Tensor:
    """-<t, log p>, with the target written out."""
    vocab = s.logits.shape[1]
    target = torch.full_like(s.logits, options.smoothing / vocab)
    target = target.scatter_add(1, s.labels[:, None], target.new_full((len(target), 1), 1 - options.smoothing))
    return -(target * torch.log_softmax(s.logits, -1)).sum(-1)


def smoothed_logits(s: Scores, batch: Batch, options: Any) -> Tensor:
    """lse - (1 - a) z_y - a mean z; parallel over the vocabulary."""
    kept = (1 - options.smoothing) * s.label() + options.smoothing * s.vocab.mean(s.logits)
    return s.vocab.logsumexp(s.logits) - kept


# Soft-cap


def capped_cross_entropy(s: Scores, batch: Batch, options: Any) -> Tensor:
    capped = options.softcap * torch.tanh(s.logits / options.softcap)
    return F.cross_entropy(capped, s.labels, reduction="none")


def capped_logsumexp(s: Scores, batch: Batch, options: Any) -> Tensor:
    """The cap's reciprocal is multiplied with; parallel over the vocabulary."""
    capped = (s.logits * (1 / options.softcap)).tanh() * options.softcap
    return s.vocab.logsumexp(capped) - s.vocab.pick(capped, s.labels)


def capped_by_exponentials(s: Scores, batch: Batch, options: Any) -> Tensor:
    """tanh x = (1 - e) / (1 + e) with e = exp(-2 x), of x or of -x, as kernels without a tanh."""
    x = s.logits / options.softcap
    below = x < 0
    small = torch.expm1(-2 * torch.where(below, -x, x))
    capped = options.softcap * (-small / (2 + small))
    capped = torch.where(below, -capped, capped)
    return -torch.log_softmax(capped, -1).gather(-1, s.labels[:, None]).squeeze(-1)


_WRITTEN: dict[str, dict[str, Any]] = {
    "z_loss": {"z_of_logsumexp": z_of_logsumexp, "z_beside_cross_entropy": z_beside_cross_entropy},
    "label_smoothing": {
        "by_torch": smoothed_by_torch,
        "terms": smoothed_terms,
        "target": smoothed_target,
    },
    "softcap": {"cross_entropy": capped_cross_entropy, "exponentials": capped_by_exponentials},
}
"""Ways to write a loss that need the whole vocabulary on one rank."""

_PARALLEL = {"z_loss": z_of_shifted, "label_smoothing": smoothed_logits, "softcap": capped_logsumexp}

_OPTIONS: dict[str, dict[str, Any]] = {
    "z_loss": {"z_loss_weight": ANY},
    "label_smoothing": {"smoothing": ANY},
    "softcap": {"softcap": ANY},
}


def regularised() -> Iterator[Candidate]:
    for spec, written in _WRITTEN.items():
        given: dict[str, Any] = {"supports": _OPTIONS[spec]}
        for name, loss in written.items():
            yield of_tokens(name, spec, "hidden", of_scores(loss), formats=TRAINED, **given)
            yield of_tokens(name, spec, "logits", of_scores(loss), **given)
        name, last = [*written][-1], of_scores([*written.values()][-1])
        yield of_tokens(name, spec, "logits", last, formats=DOUBLE, total=sum_of_sequences, **given)
        yield of_tokens(name, spec, "logits", last, formats=LOW, **given)
        yield of_tokens(name, spec, "hidden", last, formats=COARSE_LOGITS, **given)
        yield of_tokens("recomputed", spec, "hidden", last, loop=RECOMPUTED, total=selected_sum, **given)
        yield of_tokens("in_forward", spec, "hidden", last, loop=IN_FORWARD, **given)
        parallel = of_scores(_PARALLEL[spec])
        yield of_tokens("parallel", spec, "hidden", parallel, parallel=True, formats=TRAINED, **given)
        yield of_tokens("parallel", spec, "logits", parallel, parallel=True, **given)


KERNELS = (*nll(), *regularised())
