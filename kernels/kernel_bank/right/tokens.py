# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of single tokens: spec ``token_logprobs``."""

from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor

from kernel_bank.right.formats import COARSE_LOGITS, COARSE_LOSS, DOUBLE, FINE, LOW, LOW_LOSS, TRAINED, Formats
from kernel_bank.right.kernel import Call, declared
from kernel_bank.right.logprobs import (
    Way,
    cross_entropy,
    entropy_of_categorical,
    entropy_of_logits,
    entropy_of_logprobs,
    entropy_of_probabilities,
    exempt_for,
    label_less_logsumexp,
    log_softmax,
    logaddexp_of_tiles,
    online,
    parallel_entropy,
    parallel_logsumexp,
    parallel_shifted,
    row_by_row,
)
from lossgate.declaration.candidate import Candidate, Outputs
from lossgate.declaration.supports import ANY


def _both(
    head: str, way: Way, entropy: Way | None, formats: Formats, *, parallel: bool = False, label_apart: bool = False
) -> Candidate:
    """Returns a candidate that makes log-probabilities one way, and entropies another."""

    def kernel(call: Call) -> Outputs:
        scores = call.scores(slice(None), call.leaves, label_apart=label_apart)
        logprobs = call.to_loss(way(scores))
        return Outputs(logprobs=logprobs, token_entropy=None if entropy is None else call.to_loss(entropy(scores)))

    written = "_".join(w.__name__ for w in (way, entropy) if w is not None)
    name = f"{written}_apart" if label_apart else written
    differentiable = ("logprobs",) if entropy is None else ("logprobs", "token_entropy")
    given: dict[str, Any] = {"formats": formats, "parallel": parallel, "differentiable": differentiable}
    given["exempt"] = exempt_for(way) if head == "logits" else {}
    return declared(name, "token_logprobs", head, kernel, **given)


def sorted_and_cut(logits: Tensor, options: Any) -> Tensor:
    """Filters logits as Hugging Face, vLLM and NeMo-RL do: of logits that tie with the last of the
    nucleus only those stay that it needs, whichever the sort puts first.
    """
    if options.top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(min(options.top_k, logits.shape[1])).values[:, -1:], -inf)
    if options.top_p == 1:
        return logits
    ordered, order = logits.sort(1, descending=True)
    p = ordered.softmax(1)
    above = p.cumsum(1) - p
    return logits.masked_fill((above >= options.top_p).scatter(1, order, above >= options.top_p), -inf)


def _filtered(head: str, formats: Formats) -> Candidate:
    def kernel(call: Call) -> Outputs:
        scores = call.scores(slice(None), call.leaves)
        logprobs = torch.log_softmax(sorted_and_cut(scores.logits, call.options), 1)
        own = scores.vocab.pick(logprobs, scores.labels)
        # An entropy without a gradient; a label that is filtered out has none either.
        entropy = -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(1)
        return Outputs(logprobs=torch.where(own.isinf(), -inf, own), token_entropy=entropy)

    given: dict[str, Any] = {"supports": {"top_k": ANY, "top_p": ANY}, "differentiable": ("logprobs",)}
    return declared("sorted_and_cut", "token_logprobs", head, kernel, formats=formats, **given)


def _kernels() -> Iterator[Candidate]:
    yield _both("hidden", log_softmax, entropy_of_logprobs, TRAINED)
    yield _both("hidden", log_softmax, entropy_of_logits, FINE)
    yield _both("hidden", label_less_logsumexp, entropy_of_logits, FINE, label_apart=True)
    yield _both("hidden", row_by_row, entropy_of_probabilities, TRAINED)
    yield _both("hidden", cross_entropy, entropy_of_logprobs, LOW)
    yield _both("hidden", log_softmax, entropy_of_logits, COARSE_LOGITS)
    yield _both("logits", online, entropy_of_logprobs, COARSE_LOSS)
    yield _both("hidden", online, None, TRAINED)
    yield _both("hidden", parallel_shifted, parallel_entropy, TRAINED, parallel=True)
    yield _both("hidden", parallel_logsumexp, parallel_entropy, FINE, parallel=True)
    yield _both("logits", cross_entropy, entropy_of_categorical, FINE)
    yield _both("logits", log_softmax, entropy_of_logprobs, DOUBLE)
    yield _both("logits", log_softmax, entropy_of_logits, LOW_LOSS)
    yield _both("logits", log_softmax, entropy_of_logprobs, LOW)
    yield _both("logits", logaddexp_of_tiles, entropy_of_logits, FINE)
    yield _both("logits", online, entropy_of_probabilities, FINE)
    yield _both("logits", parallel_shifted, parallel_entropy, FINE, parallel=True)
    yield _filtered("logits", FINE)
    yield _filtered("hidden", FINE)


KERNELS = tuple(_kernels())
