# SPDX-License-Identifier: Apache-2.0
"""Masks of whole sequences: which of them count."""

from typing import Any

import torch
from torch import Tensor

from lossgate.specs.field_context import FieldContext
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import Option

SAMPLES = Option(name="samples", meaning="which sequences count", default="all", choices=("all", "some"))

EVERY_SEQUENCE_COUNTS = Mistake(
    name="every sequence counts",
    sentence="sequences that the sample mask leaves out count all the same",
    inputs=lambda inputs: {"sample_mask": torch.ones_like(inputs.sample_mask)},
)


def draw_sample_mask(context: FieldContext) -> Tensor:
    """Draws ``[sequences]`` bool: all of them, or about two thirds."""
    if context.scenario["samples"] == "all":
        return torch.ones(context.sequences, dtype=torch.bool)
    return context.streams.uniform("samples", context.sequences) < 0.67


def trained_tokens(batch: Any) -> Tensor:
    """Returns ``[tokens]`` bool: the token is in the mask, and its sequence counts."""
    return batch.mask & batch.sample_mask[batch.sequence]
