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
from lossgate.specs.coverage_goals import CoverageGoal
from lossgate.specs.option import TEMPERATURE
from lossgate.specs.record import Options, option

LOGIT_FILTER = "logit_filter"
"""The field ``[tokens, vocab]`` that says which logits enter the softmax; absent if all do."""

TOP_K, TOP_P = (None, 8, 3), (1.0, 0.9, 0.5)
"""What problems draw: NeMo-RL's tests have 8 and 0.9."""

_MARGIN = 2.0**-7
"""Nats that the edge of a filter keeps clear of, so that rounding moves nothing across it."""

_ROUNDINGS = 4
"""The same in units of ``eps`` times the largest logit of a token, for coarser formats. A kernel
may round logits after the product, after the bias and after the temperature. That moves two logits
apart by 3 such units at most."""

_MOVED = 0.75
"""Share of the labels outside of a filter that problems replace by one inside: a policy that is
filtered in generation as in training mostly generates those."""


class FilterOptions(Options):
    """What makes a distribution of logits."""

    temperature: float = option(1.0, "divides the logits, before they are filtered", between=TEMPERATURE)
    top_k: int | None = option(
        None,
        "only the k largest logits take part in the softmax; ties with the last of them too. None for all",
        choices=TOP_K,
    )
    top_p: float = option(
        1.0, "of those, only the most probable, until their probability reaches this. 1 for all", choices=TOP_P
    )

    def check_filter(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: One is out of range.
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
    """Makes the fields of a problem with a filter.

    Tokens for which rounding could decide otherwise what stays are masked. Most labels that are
    filtered out are replaced by others that are not.

    Args:
        logits: ``[T, V]``, before the temperature.
        fields: those of ``problems.tokens.draw_tokens``.
        coarsest: to which kernels round.
        options: those of the problem.
        streams: decides which labels are replaced, and by which.
    """
    passing, close = passing_logits(logits, coarsest, options)
    chance = streams.uniform("kept labels", *passing.shape)
    inside = torch.where(passing, chance, -1.0).argmax(1)
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
    """Returns ``[T, V]`` bool, which logits stay; and ``[T]`` bool, whether rounding could decide
    it otherwise.
    """
    tempered = logits / options.temperature
    eps = 2 * coarsest.unit if coarsest != FLOAT32 else 0.0
    margin = (_ROUNDINGS * eps * tempered.abs().amax(1)).clamp(min=_MARGIN)
    passing = kept_tokens(tempered, options.top_k, options.top_p)
    close = torch.zeros(len(passing), dtype=torch.bool)
    vocab = passing.shape[1]
    ordered = tempered.sort(1, descending=True).values
    if options.top_k is not None and options.top_k < vocab:
        close |= ordered[:, options.top_k - 1] - ordered[:, options.top_k] < margin
        ordered = ordered[:, : options.top_k]
    if options.top_p < 1:
        # Logits that move against each other by up to the margin move a log-odds by no more.
        kept = ordered.softmax(1).cumsum(1)[:, :-1]  # all together are 1, which nothing moves
        apart = (kept.logit() - log(options.top_p / (1 - options.top_p))).abs()
        close |= (apart < margin[:, None]).any(1)
        close |= (
            (ordered[:, :-1] - ordered[:, 1:] < margin[:, None])
            & passing.sum(1, keepdim=True).eq(torch.arange(1, ordered.shape[1]))
        ).any(1)
    return passing, close


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
    stay = labels_stay(fields)[trained]
    covered = set() if stay.all() else {"label filtered out"}
    return covered | ({"label kept by a filter"} if not fields[LOGIT_FILTER].all() and stay.any() else set())


_UNFILTERED = {"top_k": (None,)}
_WITH_LOGITS = ("hidden", "logits")

FILTER_GOALS: Mapping[str, CoverageGoal] = {
    "label filtered out": CoverageGoal(
        meaning="a trained label that top-k filters out, with log-probability -inf",
        unreachable_if=_UNFILTERED,
        heads=_WITH_LOGITS,
    ),
    "label kept by a filter": CoverageGoal(
        meaning="a trained label among those that a filter keeps", unreachable_if=_UNFILTERED, heads=_WITH_LOGITS
    ),
}
