# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p filtering of logits before a loss, for specs with options ``top_k`` and
``top_p``.
"""

from collections.abc import Mapping
from math import log
from typing import Any

import torch
from torch import Tensor

from dense_losses import kept_tokens
from lossgate.numerics.float_formats import FLOAT32, FloatFormat
from lossgate.problems.random_streams import RandomStreams
from lossgate.specs.coverage_goals import WITH_LOGITS, CoverageGoal
from lossgate.specs.option import TEMPERATURE
from lossgate.specs.record import Options, option

LOGIT_FILTER = "logit_filter"
"""The field ``[tokens, vocab]`` that says which logits enter the softmax; absent if all do."""

TOP_K, TOP_P = (None, 8, 3), (1.0, 0.9, 0.5)
"""The values that problems draw: NeMo-RL's tests have 8 and 0.9."""

_MARGIN = 2.0**-7
"""Nats by which the logits of trained tokens keep clear of the edge of a filter, so that rounding
moves none of them across it."""

_ROUNDINGS = 4
"""The same margin for formats coarser than float32, in units of ``eps`` times the largest logit of
a token. A kernel may round logits after the product, after the bias and after the temperature. That
moves two logits apart by at most 3 such units."""

_MOVED = 0.75
"""Share of the filtered labels that problems replace by labels that stay. A policy whose filter is
the same in generation and in training mostly generates labels that stay."""


class FilterOptions(Options):
    """The options that turn logits into a distribution."""

    temperature: float = option(1.0, "divides the logits, before they are filtered", between=TEMPERATURE)
    top_k: int | None = option(
        None,
        "only the k largest logits take part in the softmax; ties with the last of them too. None for all",
        choices=TOP_K,
    )
    top_p: float = option(
        1.0,
        "of the logits that top_k leaves, only the most probable, until their probabilities reach this sum. 1 for all",
        choices=TOP_P,
    )

    def check_filter(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: if one of them is out of range.
        """
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; expected a positive number of tokens, or None for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected a probability in (0, 1]")


def filters(options: Any) -> bool:
    """Returns whether options leave any logits out."""
    return isinstance(options, FilterOptions) and (options.top_k is not None or options.top_p < 1)


def filter_fields(
    logits: Tensor, fields: Mapping[str, Tensor], coarsest: FloatFormat, options: FilterOptions, streams: RandomStreams
) -> dict[str, Tensor]:
    """Returns the fields that a filter changes in a problem.

    A token is masked if rounding could change which of its logits stay. Most labels that are
    filtered out are replaced by labels that stay.

    Args:
        logits: ``[T, V]``, before the temperature.
        fields: those of ``problems.batch.draw_tokens``.
        coarsest: the coarsest format to which kernels round.
        options: those of the problem.
        streams: decides which labels are replaced, and by which.
    """
    passing, close = passing_logits(logits, coarsest, options)
    chance = streams.uniform("kept labels", *passing.shape)
    inside = torch.where(passing, chance, -1.0).argmax(1)  # any logit that stays, at random
    outside = ~of_labels(passing, fields["labels"])
    moved = outside & (streams.uniform("moved labels", len(passing)) < _MOVED)
    labels = torch.where(moved, inside, fields["labels"])
    return {
        LOGIT_FILTER: passing,
        "labels": labels,
        "input_ids": labels.roll(1),
        "mask": fields["mask"] & ~close,
    }


def passing_logits(logits: Tensor, coarsest: FloatFormat, options: FilterOptions) -> tuple[Tensor, Tensor]:
    """Returns ``[T, V]`` bool: the logit stays; and ``[T]`` bool: rounding could change which
    logits of the token stay.
    """
    tempered = logits / options.temperature
    eps = 2 * coarsest.unit if coarsest != FLOAT32 else 0.0
    margin = (_ROUNDINGS * eps * tempered.abs().amax(1)).clamp(min=_MARGIN)
    passing = kept_tokens(tempered, options.top_k, options.top_p)
    close = torch.zeros(len(passing), dtype=torch.bool)
    ordered = tempered.sort(1, descending=True).values
    if options.top_k is not None and options.top_k < passing.shape[1]:
        close |= ordered[:, options.top_k - 1] - ordered[:, options.top_k] < margin
        ordered = ordered[:, : options.top_k]
    if options.top_p < 1:
        close |= _close_to_top_p(ordered, options.top_p, margin)
    return passing, close


def _close_to_top_p(ordered: Tensor, top_p: float, margin: Tensor) -> Tensor:
    """Returns ``[T]`` bool: rounding, or the order of equal logits, could change which logits top-p
    keeps.

    Args:
        ordered: ``[T, k]``, the logits that top-k leaves, the largest first.
        top_p: the probability that they must reach.
        margin: ``[T]``, by how much rounding may move two logits apart.
    """
    # Logits that move against each other by up to the margin move a log-odds by no more.
    reached = ordered.softmax(1).cumsum(1)[:, :-1]  # all together are 1, which nothing moves
    apart = (reached.logit() - log(top_p / (1 - top_p))).abs()
    gaps = ordered[:, :-1] - ordered[:, 1:]
    needed = (reached < top_p).sum(1, keepdim=True) + 1  # a kernel that sorts keeps no more, whatever ties with them
    is_edge = needed == torch.arange(1, ordered.shape[1])
    near_sum, near_tie = apart < margin[:, None], is_edge & (gaps < margin[:, None])
    return (near_sum | near_tie).any(1)


def of_labels(passing: Tensor, labels: Tensor) -> Tensor:
    """Returns ``[T]`` bool: the label stays."""
    return passing.gather(1, labels[:, None]).squeeze(1)


def labels_stay(fields: Mapping[str, Tensor]) -> Tensor:
    """Returns ``[T]`` bool: the label is not filtered out. All are true without a filter."""
    if LOGIT_FILTER not in fields:
        return torch.ones_like(fields["mask"])
    return of_labels(fields[LOGIT_FILTER], fields["labels"])


def covered_filter_goals(fields: Mapping[str, Tensor], trained: Tensor) -> set[str]:
    """Returns the ``FILTER_GOALS`` that a batch reaches.

    Args:
        fields: of the batch.
        trained: ``[T]`` bool, the tokens that count.
    """
    if LOGIT_FILTER not in fields:
        return set()
    stay, covered = labels_stay(fields)[trained], set[str]()
    if not stay.all():
        covered.add("label filtered out")
    if stay.any() and not fields[LOGIT_FILTER].all():
        covered.add("label kept by a filter")
    return covered


_UNFILTERED = {"top_k": (None,)}

FILTER_GOALS: Mapping[str, CoverageGoal] = {
    "label filtered out": CoverageGoal(
        meaning="a trained label that top-k filters out, with log-probability -inf",
        unreachable_if=_UNFILTERED,
        heads=WITH_LOGITS,
    ),
    "label kept by a filter": CoverageGoal(
        meaning="a trained label among those that a filter keeps", unreachable_if=_UNFILTERED, heads=WITH_LOGITS
    ),
}
