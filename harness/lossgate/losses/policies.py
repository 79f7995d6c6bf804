# SPDX-License-Identifier: Apache-2.0
"""Where the log-probabilities of other policies are put: relative to those of the policy itself, on every side of every clip."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lossgate.problems.random_streams import Bits
from lossgate.specs.spec import Draft

Span = tuple[float, float]


NEAR: Sequence[Span] = ((-0.3, -0.1), (0.1, 0.3))
"""Of log-ratios whose square counts: not so near to 0 that nothing but rounding is left of it."""


def place(bits: Bits, stream: str, count: int, spans: Sequence[Span]) -> Tensor:
    """``[count]`` numbers, each evenly from one of ``spans`` at random."""
    which = bits.integers(f"{stream} span", len(spans), count)
    low, high = (torch.tensor([span[i] for span in spans], dtype=torch.float64)[which] for i in (0, 1))
    return low + (high - low) * bits.uniform(stream, count)


def clip_spans(low: float, high: float, beyond: float | None = None) -> dict[str, Span]:
    """Spans of a log-ratio that is clipped to ``[low, high]``, clear of both edges; ``beyond`` is a further edge above."""
    far = high + 0.7 if beyond is None else beyond - 0.1 * (beyond - high)
    spans = {
        "inside": (0.8 * low, 0.8 * high),
        "below": (low - 0.7, low - 0.02),
        "above": (high + 0.1 * (far - high), far),
    }
    spans |= {"just below": (low - 0.05, low - 0.01), "just above": (high + 0.01, high + min(0.05, 0.1 * (far - high)))}
    return spans if beyond is None else {**spans, "beyond": (beyond + 0.02, beyond + 0.8)}


def of_tokens(draft: Draft, of_sequences: Tensor) -> Tensor:
    """A number for each sequence, on each of its tokens."""
    return of_sequences[draft.batch.partition.sequence_of_token]


def sample_mask(draft: Draft) -> Tensor:
    """``[sequences]`` bool: all, or about two thirds of them."""
    if draft.scenario["samples"] == "all":
        return torch.ones(draft.sequences, dtype=torch.bool)
    return draft.bits.uniform("samples", draft.sequences) < 0.67


def advantages(draft: Draft) -> Tensor:
    """``[tokens]``, bounded away from 0, or all 0."""
    size = 0.25 + 2 * draft.bits.uniform("advantages", draft.tokens)
    sign = draft.bits.integers("advantage signs", 2, draft.tokens) * 2.0 - 1
    return {"mixed": sign * size, "positive": size, "negative": -size, "zero": 0 * size}[draft.scenario["advantages"]]


def reference_logprobs(draft: Draft, clamp: float | None = None) -> Tensor:
    """Of the reference policy: near, equal, or so far that KL estimates are clamped, at ``clamp`` or 40 nats or less."""
    far = max(45.0, (clamp or 0.0) + 5)
    spans: dict[str, Sequence[Span]] = {
        "near": NEAR,
        "equal": [(0.0, 0.0)],
        "far": [(-0.8, 0.8), (-far - 3, -far), (far, far + 3), (5.2, 9.0), (-9.0, -5.2), (1.5, 2.3), (-30.0, -25.0)],
    }
    return draft.logprobs + place(draft.bits, "reference", draft.tokens, spans[draft.scenario["reference"]])
