# SPDX-License-Identifier: Apache-2.0
"""Spec ``preference``: the loss of a reward model, on pairs of a chosen and a rejected response."""

from functools import partial

import torch
from torch import Tensor

import dense_losses
from dense_losses.preference import SigmoidLoss, sigmoid_loss, two_class_loss
from lossgate.losses.shared.sequences import (
    PAIR_GOALS,
    PAIR_METRICS,
    SAMPLES,
    PairBatch,
    covered_pairs,
)
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.declare import spec
from lossgate.specs.record import Options, option
from lossgate.specs.token_values import TokenValues


class PreferenceOptions(Options):
    """The options of spec ``preference``."""

    epsilon: float = option(
        0.0,
        "added to the number of pairs that divides the loss and the metrics: 1e-8 in NeMo-RL",
        choices=(0.0, 1e-8, 0.5),
    )


def _covered_preference(batch: GlobalBatch, options: PreferenceOptions) -> set[str]:
    rewards = batch.leaves["rewards"] * batch.fields["sample_mask"]
    chosen, rejected = rewards[0::2], rewards[1::2]
    covered = covered_pairs(batch.fields["sample_mask"], torch.ones(len(rewards), dtype=torch.bool))
    if (chosen > rejected).any():
        covered.add("chosen preferred")
    if (chosen < rejected).any():
        covered.add("rejected preferred")
    return covered


def _loss(
    values: TokenValues, batch: PairBatch, options: PreferenceOptions, sigmoid_loss: SigmoidLoss
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = dense_losses.preference(
        rewards=values.logprobs,
        sample_mask=batch.sample_mask,
        valid_sequences=batch.valid_sequences,
        epsilon=options.epsilon,
        sigmoid_loss=sigmoid_loss,
    )
    del metrics["loss"]  # the loss itself
    return loss, metrics


@spec(
    "preference",
    summary="the Bradley-Terry loss of a reward model",
    source="NeMo-RL PreferenceLossFn",
    batch=PairBatch,
    options=PreferenceOptions,
    heads=("rewards",),
    outputs=("loss",),
    scenarios=(SAMPLES,),
    group_size=2,
    trained=lambda batch: batch.sample_mask,
    trained_dim="sequence",
    kinks=True,
    metrics=PAIR_METRICS,
    goals=PAIR_GOALS,
    covered=_covered_preference,
    also_written=(partial(_loss, sigmoid_loss=two_class_loss),),
)
def preference(values: TokenValues, batch: PairBatch, options: PreferenceOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """The Bradley-Terry loss."""
    return _loss(values, batch, options, sigmoid_loss)
