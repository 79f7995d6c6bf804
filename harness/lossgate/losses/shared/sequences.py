# SPDX-License-Identifier: Apache-2.0
"""Parts of losses that count whole sequences, or pairs of a chosen and a rejected response."""

from typing import Any

import torch
from torch import Tensor

from lossgate.specs.coverage_goals import CoverageGoal
from lossgate.specs.field_context import FieldContext
from lossgate.specs.option import Option
from lossgate.specs.outputs import Metric
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import field

SAMPLES = Option(name="samples", meaning="which sequences count", default="all", choices=("all", "some"))


def draw_sample_mask(context: FieldContext) -> Tensor:
    """Draws ``[sequences]`` bool: true for all sequences, or for about two thirds."""
    if context.scenario["samples"] == "all":
        return torch.ones(context.sequences, dtype=torch.bool)
    return context.streams.uniform("samples", context.sequences) < 0.67


def trained_tokens(batch: Any) -> Tensor:
    """Returns ``[tokens]`` bool: the token is in the mask, and its sequence counts."""
    return batch.mask & batch.sample_mask[batch.sequence]


PAIR_METRICS = {
    "accuracy": Metric(meaning="share of pairs whose chosen sequence has the larger reward"),
    "rewards_chosen_mean": Metric(meaning="mean reward of chosen sequences, in nats, without beta"),
    "rewards_rejected_mean": Metric(meaning="mean reward of rejected sequences"),
    "num_valid_samples": Metric(meaning="pairs that count"),
}
PAIR_GOALS = {
    "pair that counts": CoverageGoal(meaning="a pair of sequences with trained tokens that the sample mask keeps"),
    "pair that does not count": CoverageGoal(
        meaning="a pair of sequences with trained tokens that the sample mask leaves out, while another pair counts",
        unreachable_if={"samples": ("all",)},
    ),
    "chosen preferred": CoverageGoal(meaning="a pair whose chosen sequence has the larger reward"),
    "rejected preferred": CoverageGoal(meaning="a pair whose rejected sequence has the larger reward"),
}


def _draw_pairs(context: FieldContext) -> Tensor:
    """Draws a sample mask that is the same for both sequences of a pair.

    NeMo-RL masks the rewards of rejected responses by their own entries; we do not reproduce that.
    """
    return draw_sample_mask(context)[0::2].repeat_interleave(2)


class PairBatch(Batch):
    """The fields that losses of pairs add to a packed batch.

    Sequences 2p and 2p + 1 are the chosen and the rejected response of pair p, on one dp rank.
    """

    sample_mask: Tensor = field(
        "sequence",
        "the sequence counts. The chosen response's entry decides about the pair. mask is the token mask only",
        dtype="bool",
        draw=_draw_pairs,
    )
    valid_tokens: Tensor = field(
        "",
        "trained tokens of the whole batch, over every rank, in sequences that count",
        dtype="int64",
        count=lambda batch: trained_tokens(batch).sum(),
    )
    valid_sequences: Tensor = field(
        "",
        "sequences that count, of the whole batch. Losses and metrics are divided by half of it, the pairs",
        dtype="int64",
        count=lambda batch: batch.sample_mask.sum(),
    )


def covered_pairs(samples: Tensor, at_stake: Tensor) -> set[str]:
    """Returns the names of the goals of ``PAIR_GOALS`` that a batch reaches by its sample mask.

    Args:
        samples: ``[sequences]`` bool, the sample mask.
        at_stake: ``[sequences]`` bool, the sequences that change the loss if they count.
    """
    counts, at_stake = samples[0::2], at_stake[0::2] | at_stake[1::2]
    if not (counts & at_stake).any():
        return set()
    if (~counts & at_stake).any():
        return {"pair that counts", "pair that does not count"}
    return {"pair that counts"}
