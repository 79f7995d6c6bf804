# SPDX-License-Identifier: Apache-2.0
"""Draws loss masks, which tell the tokens of each sequence that are trained."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lossgate.problems.random_streams import RandomStreams

MaskPattern = Literal["all", "none", "response", "holes"]
MASK_PATTERNS: Mapping[MaskPattern, str] = MappingProxyType(
    {
        "all": "every token that has a next one in its sequence",
        "none": "no token",
        "response": "the tail of the sequence, from a random token on",
        "holes": "tokens at random, about six in ten",
    }
)


def draw_mask(patterns: Sequence[MaskPattern], lengths: Sequence[int], streams: RandomStreams) -> Tensor:
    """Draws the loss mask of sequences that lie end to end without padding.

    Args:
        patterns: the pattern of each sequence.
        lengths: the number of tokens of each sequence.
        streams: the source of random numbers.

    Returns:
        ``[sum(lengths)]`` bool. The last token of a sequence is never trained: it has no next
        token.
    """
    chances = streams.uniform("mask", sum(lengths)).split(list(lengths))
    return torch.cat([_sequence_mask(pattern, chance) for pattern, chance in zip(patterns, chances, strict=True)])


def _sequence_mask(pattern: MaskPattern, chance: Tensor) -> Tensor:
    if not len(chance):
        return torch.zeros(0, dtype=torch.bool)
    mask = torch.ones(len(chance), dtype=torch.bool)
    if pattern == "none":
        mask[:] = False
    elif pattern == "holes":
        mask = chance < 0.6
    elif pattern == "response":
        mask[: int(chance[0] * len(chance))] = False
    mask[-1] = False
    return mask
