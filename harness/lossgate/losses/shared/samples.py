# SPDX-License-Identifier: Apache-2.0
"""Masks of whole sequences: which of them count."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import Option
from lossgate.specs.spec import FieldContext

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


def trained_tokens(fields: Mapping[str, Tensor]) -> Tensor:
    """Returns ``[tokens]`` bool: the token is in the mask, and its sequence counts."""
    return fields["mask"] & fields["sample_mask"][fields["sequence"]]


def count_samples(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Counts trained tokens and sequences that count."""
    return {"valid_tokens": trained_tokens(fields).sum(), "valid_sequences": fields["sample_mask"].sum()}
