# SPDX-License-Identifier: Apache-2.0
"""Specs ``dpo`` and ``preference``: losses on pairs of a chosen and a rejected response."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import dense_losses
from dense_losses import DpoOptions
from lossgate.losses.shared.policies import on_tokens
from lossgate.losses.shared.samples import EVERY_SEQUENCE_COUNTS, SAMPLES, draw_sample_mask, trained_tokens
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.coverage import CoverageGoal
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.inputs import Batch
from lossgate.specs.metric import Metric
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import TEMPERATURE, Option
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues


class DpoSpecOptions(DpoOptions, Options):
    """The options of spec ``dpo``."""

    temperature: float = option(1.0, "divides the logits", between=TEMPERATURE)


class PreferenceOptions(Options):
    """The options of spec ``preference``."""

    epsilon: float = option(
        0.0,
        "added to the number of pairs that divides the loss and the metrics: 1e-8 in NeMo-RL",
        choices=(0.0, 1e-8, 0.5),
    )


def _draw_pairs(context: FieldContext) -> Tensor:
    """Masks a pair as a whole.

    NeMo-RL masks its rewards by the rejected response alone; we do not reproduce that.
    """
    return draw_sample_mask(context)[0::2].repeat_interleave(2)


class PairBatch(Batch):
    """What both specs add to a packed batch.

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


class DpoBatch(PairBatch):
    """What spec ``dpo`` adds to a batch of pairs."""

    # They are shifted as the option says, not as the harness would.
    reference_logprobs: Tensor = field(
        "token",
        "log-probabilities of the labels, of the reference policy, in the layout of option reference_layout",
        unshifted=True,
    )


def _loss(values: TokenValues, batch: DpoBatch, options: DpoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = dense_losses.dpo(
        logprobs=values.logprobs,
        reference_logprobs=batch.reference_logprobs,
        mask=batch.mask,
        sequence=batch.sequence,
        sample_mask=batch.sample_mask,
        valid_sequences=batch.valid_sequences,
        options=options,
    )
    del metrics["loss"]  # the loss itself
    return loss, metrics


_REFERENCE = Option(
    name="reference",
    meaning="the reference policy: near, equal to the policy, or far off in either direction",
    default="near",
    choices=("near", "far", "equal"),
)


def _draw_dpo(context: FieldContext) -> dict[str, Tensor]:
    size = {"near": 0.3, "far": 2.0, "equal": 0.0}[context.scenario["reference"]]
    tilt = on_tokens(context, context.streams.normal("reference tilt", context.sequences))
    near = context.logprobs + size * (context.streams.normal("reference", context.tokens) + tilt)
    return {"reference_logprobs": _in_layout(near, context)}


def _in_layout(values: Tensor, context: FieldContext) -> Tensor:
    """Moves values from the alignment of the labels to that of the option, within each sequence."""
    if context.options.reference_layout == "next":
        return values
    shifted, starts = values.clone(), context.batch.partition.starts
    for start, end in pairwise(starts):
        part = values[start:end]
        if context.options.reference_layout == "token" and end > start:
            shifted[start:end] = torch.cat([part.new_zeros(1), part[:-1]])
        elif end > start:
            shifted[start:end] = torch.cat([part[:-1], part[:1]])  # rolled round from the start
    return shifted


def _covered_pairs(batch: GlobalBatch) -> set[str]:
    samples = batch.fields["sample_mask"]
    covered = {"pair that counts"} if samples.any() else set[str]()
    return covered | ({"pair that does not count"} if not samples.all() else set())


def _covered_dpo(batch: GlobalBatch, options: DpoSpecOptions) -> set[str]:
    covered = _covered_pairs(batch)
    if bool(batch.fields["sample_mask"].any()):
        _, outputs = _loss(TokenValues(logprobs=batch.policy), DpoBatch.of(batch.known), options)
        covered |= {"chosen preferred"} if outputs["accuracy"] > 0 else set()
        covered |= (
            {"rejected preferred"} if outputs["rewards_rejected_mean"] > outputs["rewards_chosen_mean"] else set()
        )
    return covered


def _covered_preference(batch: GlobalBatch, _options: Any) -> set[str]:
    rewards = batch.leaves["rewards"] * batch.fields["sample_mask"]
    covered = _covered_pairs(batch)
    covered |= {"chosen preferred"} if bool((rewards[0::2] > rewards[1::2]).any()) else set()
    return covered | ({"rejected preferred"} if bool((rewards[0::2] < rewards[1::2]).any()) else set())


_METRICS = {
    "accuracy": Metric(meaning="share of pairs whose chosen sequence has the larger reward"),
    "rewards_chosen_mean": Metric(meaning="mean reward of chosen sequences, in nats, without beta"),
    "rewards_rejected_mean": Metric(meaning="mean reward of rejected sequences"),
    "num_valid_samples": Metric(meaning="pairs that count"),
}
_PAIRS = {
    "pair that counts": CoverageGoal(meaning="a pair of sequences that the sample mask keeps"),
    "pair that does not count": CoverageGoal(meaning="a pair of sequences that the sample mask leaves out"),
    "chosen preferred": CoverageGoal(meaning="a pair whose chosen sequence has the larger reward"),
    "rejected preferred": CoverageGoal(meaning="a pair whose rejected sequence has the larger reward"),
}
_SWITCH = (False, True)


@spec(
    "dpo",
    summary="direct preference optimisation and IPO, with an optional SFT term",
    source="NeMo-RL DPOLossFn, TRL DPOTrainer",
    batch=DpoBatch,
    options=DpoSpecOptions,
    choices={
        "reference_policy_kl_penalty": (0.05, 0.5, 0.1),
        "preference_loss_weight": (1.0, 0.5),
        "sft_loss_weight": (0.0, 1.0, 0.25),
        "preference_average_log_probs": _SWITCH,
        "sft_average_log_probs": _SWITCH,
        "loss_type": ("sigmoid", "ipo"),
        "reference_layout": ("next", "token", "rolled"),
        "epsilon": (0.0, 1e-8, 0.5),
    },
    heads=("hidden", "logits", "logprobs"),
    temperature="temperature",
    draw=_draw_dpo,
    scenarios=(_REFERENCE, SAMPLES),
    group_size=2,
    trained=trained_tokens,
    kinks=True,
    tie_scenarios={"reference": "equal"},  # only the accuracy compares
    mistakes=(
        Mistake(
            name="sums and means swapped",
            sentence="log-probabilities are averaged where they should be summed, and the other way round",
            options=lambda o: replace(o, preference_average_log_probs=not o.preference_average_log_probs),
        ),
        EVERY_SEQUENCE_COUNTS,
    ),
    metrics={
        "sft_loss": Metric(meaning="the SFT term before its weight"),
        "preference_loss": Metric(meaning="the preference term before its weight"),
        **_METRICS,
    },
    goals=_PAIRS,
    covered=_covered_dpo,
)
def dpo(values: TokenValues, batch: DpoBatch, options: DpoSpecOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimisation."""
    return _loss(values, batch, options)


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
    mistakes=(EVERY_SEQUENCE_COUNTS,),
    metrics=_METRICS,
    goals=_PAIRS,
    covered=_covered_preference,
)
def preference(values: TokenValues, batch: PairBatch, options: PreferenceOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """The Bradley-Terry loss."""
    loss, metrics = dense_losses.preference(
        rewards=values.logprobs,
        sample_mask=batch.sample_mask,
        valid_sequences=batch.valid_sequences,
        epsilon=options.epsilon,
    )
    del metrics["loss"]  # the loss itself
    return loss, metrics
