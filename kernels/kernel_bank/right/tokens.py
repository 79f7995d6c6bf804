# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropies of single tokens: spec ``token_logprobs``."""

from collections.abc import Iterator
from typing import Any

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


KERNELS = tuple(_kernels())
