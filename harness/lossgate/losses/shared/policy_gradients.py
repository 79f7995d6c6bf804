# SPDX-License-Identifier: Apache-2.0
"""Parts that losses of policies share: draws of other policies' log-probabilities, and the goals of
clipped ratios.

The ratios to the policy's own probabilities can fall on every side of every clip.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.coverage_goals import CoverageGoal
from lossgate.specs.field_context import FieldContext
from lossgate.specs.logit_filter import filters
from lossgate.specs.option import Option

Span = tuple[float, float]
"""The ends of an interval of log-ratios, in nats."""

NEAR: Sequence[Span] = ((-0.3, -0.1), (0.1, 0.3))
"""Spans of small log-ratios. They are not so close to 0 that their squares are lost in rounding."""

OVERFLOW: Span = (850.0, 900.0)
"""A span of log-ratios whose ratio is infinite, also in float64, in which references compute, and
also if it is multiplied by one of ``UNDERFLOW``."""

UNDERFLOW: Sequence[Span] = ((-40.0, -20.0), (-110.0, -95.0))
"""Spans of log-ratios whose ratio is almost 0, or 0 in float32."""

_FILTERED_BEFORE = 0.1
"""Share of the labels that only the filter of the policy before the update leaves out."""

ADVANTAGES = Option(
    name="advantages",
    meaning="signs of the advantages",
    default="mixed",
    choices=("mixed", "mixed", "positive", "negative", "zero"),
)
ADVANTAGES_PER = Option(
    name="advantages_per",
    meaning="what has an advantage of its own: each token; or each sequence, all of whose tokens then have the same",
    default="token",
    choices=("token",),
    on_request=("sequence",),
)
RATIOS = Option(
    name="ratios",
    meaning="where importance ratios lie: well inside the clip, on every side of every clip, all exactly 1, "
    "or near underflow and overflow",
    default="inside",
    choices=("inside", "everywhere", "everywhere", "everywhere", "on-policy", "extreme"),
)
RATIOS_EXTREME = Option(
    name="ratios_extreme",
    meaning="on which sides of 1 importance ratios lie in problems with ratios 'extreme'",
    default="both",
    choices=("both",),
    on_request=("below", "above"),
)
REFERENCE = Option(
    name="reference",
    meaning="the reference policy: near, equal to the policy, or so far off that estimates are clamped, even with "
    "log-probabilities above 0",
    default="near",
    choices=("near", "far", "far", "equal"),
)
GENERATION = Option(
    name="generation",
    meaning="the policy that generated: near or equal to that before the update, or on every side of every truncation",
    default="near",
    choices=("near", "everywhere", "everywhere", "equal"),
)


def draw_in_spans(streams: RandomStreams, stream: str, count: int, spans: Sequence[Span]) -> Tensor:
    """Draws ``[count]`` numbers. Each is uniform in one of ``spans``, which is chosen at random."""
    which = streams.integers(f"{stream} span", len(spans), count)
    low, high = torch.tensor(spans, dtype=torch.float64)[which].unbind(1)
    return low + (high - low) * streams.uniform(stream, count)


def clip_spans(low: float, high: float, beyond: float | None = None) -> dict[str, Span]:
    """Returns spans of a log-ratio that is clipped to ``[low, high]``, by name. All keep clear of
    the edges.

    Args:
        low, high: the edges, in nats.
        beyond: a further edge above; None if there is none.
    """
    far = high + 0.7 if beyond is None else beyond - 0.1 * (beyond - high)
    spans = {
        "inside": (0.8 * low, 0.8 * high),
        "below": (low - 0.7, low - 0.02),
        "above": (high + 0.1 * (far - high), far),
        "just below": (low - 0.05, low - 0.01),
        "just above": (high + 0.01, high + min(0.05, 0.1 * (far - high))),
    }
    if beyond is not None:
        spans["beyond"] = (beyond + 0.02, beyond + 0.8)
    return spans


def extreme_spans(context: FieldContext, highest: Span) -> list[Span]:
    """Returns spans of log-ratios near underflow and overflow, on the sides that scenario
    ``RATIOS_EXTREME`` names.

    Args:
        context: of the problem.
        highest: the highest span.
    """
    side = context.scenario[RATIOS_EXTREME.name]
    above: Sequence[Span] = ((10.0, 20.0), highest)
    return [*(UNDERFLOW if side != "above" else ()), *(above if side != "below" else ())]


def on_tokens(context: FieldContext, per_sequence: Tensor) -> Tensor:
    """Copies a number per sequence to each of its tokens."""
    return per_sequence[context.batch.partition.sequence_of_token]


def scattered(context: FieldContext, stream: str, per_sequence: Tensor) -> Tensor:
    """Returns numbers of tokens, ``[tokens]``, whose mean over each sequence is a given one.

    In one half of the sequences they lie close together. In the other they lie far apart, so that
    some tokens are on another side of 0, and of bounds, than their sequence.
    """
    sequence = context.batch.partition.sequence_of_token
    size = torch.where(context.streams.uniform(f"{stream} size", context.sequences) < 0.5, 0.02, 0.5)
    scatter = on_tokens(context, size) * context.streams.normal(f"{stream} scatter", context.tokens)
    sums = torch.zeros(context.sequences, dtype=torch.float64).index_add(0, sequence, scatter)
    means = sums / sequence.bincount(minlength=context.sequences).clamp(min=1)
    return on_tokens(context, per_sequence - means) + scatter


def below_zero(logprobs: Tensor, distance: Tensor) -> Tensor:
    """Returns log-probabilities at some distance from others. If they were above 0, they are at the
    same distance on the other side.
    """
    return logprobs + torch.where(logprobs + distance > 0, -distance, distance)


def draw_advantages(context: FieldContext) -> Tensor:
    """Draws ``[tokens]`` advantages, which are all 0, or none of them near 0."""
    of_sequences = context.scenario["advantages_per"] == "sequence"
    count = context.sequences if of_sequences else context.tokens
    size = 0.25 + 2 * context.streams.uniform("advantages", count)
    sign = context.streams.integers("advantage signs", 2, count) * 2.0 - 1
    drawn = {"mixed": sign * size, "positive": size, "negative": -size, "zero": 0 * size}
    chosen = drawn[context.scenario["advantages"]]
    return on_tokens(context, chosen) if of_sequences else chosen


def draw_reference_logprobs(context: FieldContext, clamp: float | None = None) -> Tensor:
    """Draws ``[tokens]`` log-probabilities of the reference policy.

    They are near to those of the policy, equal, or so far that KL estimates are clamped, at
    ``clamp`` or at 40 nats or less. Far ones may be above 0, which no model gives.
    """
    far = max(45.0, (clamp or 0.0) + 5)
    spans: dict[str, Sequence[Span]] = {
        "near": NEAR,
        "equal": [(0.0, 0.0)],
        "far": [(-0.8, 0.8), (-far - 3, -far), (far, far + 3), (5.2, 9.0), (-9.0, -5.2), (1.5, 2.3), (-30.0, -25.0)],
    }
    scenario = context.scenario["reference"]
    distance = draw_in_spans(context.streams, "reference", context.tokens, spans[scenario])
    return context.unfiltered + distance if scenario == "far" else below_zero(context.unfiltered, distance)


def draw_filtered_before(context: FieldContext, logprobs: Tensor) -> Tensor:
    """Leaves out some labels, as top-k or top-p may have done before the update, if there is a
    filter.

    Args:
        context: of the problem.
        logprobs: ``[tokens]``, of the policy before the update.

    Returns:
        ``logprobs``, with -inf at some tokens.
    """
    if not filters(context.options):
        return logprobs
    gone = context.streams.uniform("filtered before", context.tokens) < _FILTERED_BEFORE
    return torch.where(gone, -torch.inf, logprobs)


_SIDES = ("inside", "below", "above")


def clip_goals(
    unit: str, unreachable_if: Mapping[str, Any], below_unreachable_if: Mapping[str, Any] | None = None
) -> dict[str, CoverageGoal]:
    """Returns a goal for each side of the clip and each sign of the advantage.

    Args:
        unit: "token" or "sequence", whichever has a ratio.
        unreachable_if: when no problem reaches any of these goals; see ``CoverageGoal``.
        below_unreachable_if: when no problem reaches the goals below the clip, either.
    """
    goals: dict[str, CoverageGoal] = {}
    for side in _SIDES:
        unreachable: dict[str, Any] = {} if side == "inside" else {"ratios": ("inside", "on-policy")}
        unreachable |= unreachable_if
        if side == "below":
            unreachable |= below_unreachable_if or {}
        for sign, others in {"<": ("positive", "zero"), ">": ("negative", "zero")}.items():
            goals[_name(unit, side, sign)] = CoverageGoal(
                meaning=f"a {unit}'s ratio {side} the clip, with an advantage {sign} 0",
                unreachable_if={**unreachable, "advantages": others},
            )
    return goals


def covered_clip_goals(unit: str, log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Iterator[str]:
    """Yields the names of the ``clip_goals`` that ratios reach.

    Args:
        unit: as for ``clip_goals``.
        log_ratio: ``[n]``, in nats.
        advantage: ``[n]``.
        low, high: the bounds to which the log-ratio is clipped.
    """
    sides = ((log_ratio > low) & (log_ratio < high), log_ratio < low, log_ratio > high)
    for side, there in zip(_SIDES, sides, strict=True):
        for sign, signed in {"<": advantage < 0, ">": advantage > 0}.items():
            if bool((there & signed).any()):
                yield _name(unit, side, sign)


def _name(unit: str, side: str, sign: str) -> str:
    return f"{unit} {side} the clip, A {sign} 0"
