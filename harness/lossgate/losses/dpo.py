# SPDX-License-Identifier: Apache-2.0
"""Specs ``dpo`` and ``preference``: losses on pairs of a chosen and a rejected response."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dense_losses import DpoOptions, dpo, preference
from lossgate.losses.shared.policies import on_tokens
from lossgate.losses.shared.samples import (
    EVERY_SEQUENCE_COUNTS,
    SAMPLES,
    count_samples,
    draw_sample_mask,
    trained_tokens,
)
from lossgate.problems.batch import GlobalBatch
from lossgate.problems.partition import Dims
from lossgate.specs.coverage import TOKEN_GOALS, CoverageGoal, covered_token_goals
from lossgate.specs.inputs import HiddenHead, LogitsHead, LogprobsHead, PackedBatch, RewardsHead
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import TEMPERATURE, Between, Option, options_of
from lossgate.specs.spec import FieldContext, Metric, Spec
from lossgate.specs.token_values import TokenValues


@dataclass(frozen=True, kw_only=True)
class DpoSpecOptions(DpoOptions):
    """The options of spec ``dpo``."""

    temperature: float = 1.0
    """Divides the logits."""


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """The options of spec ``preference``."""

    epsilon: float = 0.0
    """Added to the number of pairs that divides the loss and the metrics: 1e-8 in NeMo-RL."""


@dataclass(frozen=True, kw_only=True)
class PairBatch(PackedBatch):
    """What both specs add to a packed batch. S is the number of this dp rank's sequences.

    Sequences 2p and 2p + 1 are the chosen and the rejected response of pair p, on one dp rank.
    """

    sample_mask: Tensor
    """``[S]`` bool: the sequence counts. The chosen response's entry decides about the pair.
    ``mask`` is the token mask only."""
    valid_sequences: Tensor
    """Scalar int64: sequences that count, of the whole batch. Losses and metrics are divided by
    half of it, the pairs."""


@dataclass(frozen=True, kw_only=True)
class DpoBatch(PairBatch):
    """What spec ``dpo`` adds to a batch of pairs."""

    reference_logprobs: Tensor
    """``[T]``, of the reference policy, in the layout of the option ``reference_layout``."""


@dataclass(frozen=True, kw_only=True)
class DpoHiddenInputs(HiddenHead, DpoBatch):
    """The inputs at head "hidden"."""


@dataclass(frozen=True, kw_only=True)
class DpoLogitsInputs(LogitsHead, DpoBatch):
    """The inputs at head "logits"."""


@dataclass(frozen=True, kw_only=True)
class DpoLogprobsInputs(LogprobsHead, DpoBatch):
    """The inputs at head "logprobs"."""


@dataclass(frozen=True, kw_only=True)
class PreferenceInputs(RewardsHead, PairBatch):
    """The inputs at head "rewards"."""


def _dpo_loss(
    values: TokenValues, batch: Mapping[str, Tensor], options: DpoOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    names = ("reference_logprobs", "mask", "sequence", "sample_mask", "valid_sequences")
    loss, metrics = dpo(logprobs=values.logprobs, options=options, **{name: batch[name] for name in names})
    del metrics["loss"]  # the loss itself
    return loss, metrics


def _preference_loss(
    values: TokenValues, batch: Mapping[str, Tensor], options: PreferenceOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = preference(
        rewards=values.logprobs,
        sample_mask=batch["sample_mask"],
        valid_sequences=batch["valid_sequences"],
        epsilon=options.epsilon,
    )
    del metrics["loss"]
    return loss, metrics


_REFERENCE = Option(
    name="reference",
    meaning="the reference policy: near, equal to the policy, or far off in either direction",
    default="near",
    choices=("near", "far", "equal"),
)


def _make_dpo_fields(context: FieldContext) -> dict[str, Tensor]:
    size = {"near": 0.3, "far": 2.0, "equal": 0.0}[context.scenario["reference"]]
    tilt = on_tokens(context, context.streams.normal("reference tilt", context.sequences))
    near = context.logprobs + size * (context.streams.normal("reference", context.tokens) + tilt)
    return _make_pair_fields(context) | {"reference_logprobs": _in_layout(near, context)}


def _make_pair_fields(context: FieldContext) -> dict[str, Tensor]:
    """Masks a pair as a whole.

    NeMo-RL masks its rewards by the rejected response alone; we do not reproduce that.
    """
    samples = draw_sample_mask(context)
    return {"sample_mask": samples[0::2].repeat_interleave(2)}


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
    fields = batch.fields
    outputs = _dpo_loss(TokenValues(logprobs=batch.policy), fields, options)[1]
    covered = covered_token_goals(batch, trained_tokens(fields)) | _covered_pairs(batch)
    if bool(fields["sample_mask"].any()):
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
_PAIR_FIELDS: Mapping[str, Dims] = {"sample_mask": ("sequence",), "valid_sequences": ()}
_SWITCH = (False, True)

DPO = Spec(
    name="dpo",
    summary="direct preference optimisation and IPO, with an optional SFT term",
    source="NeMo-RL DPOLossFn, TRL DPOTrainer",
    loss=_dpo_loss,
    temperature="temperature",
    options_type=DpoSpecOptions,
    options=options_of(
        DpoSpecOptions,
        {
            "reference_policy_kl_penalty": (0.05, 0.5, 0.1),
            "preference_loss_weight": (1.0, 0.5),
            "sft_loss_weight": (0.0, 1.0, 0.25),
            "preference_average_log_probs": _SWITCH,
            "sft_average_log_probs": _SWITCH,
            "loss_type": ("sigmoid", "ipo"),
            "reference_layout": ("next", "token", "rolled"),
            "epsilon": (0.0, 1e-8, 0.5),
            "temperature": Between(TEMPERATURE),
        },
    ),
    inputs={"hidden": DpoHiddenInputs, "logits": DpoLogitsInputs, "logprobs": DpoLogprobsInputs},
    fields={**_PAIR_FIELDS, "reference_logprobs": ("token",)},
    unshifted=frozenset({"reference_logprobs"}),  # they are shifted as the option reference_layout says
    make_fields=_make_dpo_fields,
    scenarios=(_REFERENCE, SAMPLES),
    group_size=2,
    counts=count_samples,
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
    goals={**TOKEN_GOALS, **_PAIRS},
    covered=_covered_dpo,
)

PREFERENCE = Spec(
    name="preference",
    summary="the Bradley-Terry loss of a reward model",
    source="NeMo-RL PreferenceLossFn",
    loss=_preference_loss,
    options_type=PreferenceOptions,
    options=options_of(PreferenceOptions, {"epsilon": (0.0, 1e-8, 0.5)}),
    outputs=("loss",),
    inputs={"rewards": PreferenceInputs},
    fields=_PAIR_FIELDS,
    make_fields=_make_pair_fields,
    scenarios=(SAMPLES,),
    group_size=2,
    counts=count_samples,
    trained=lambda fields: fields["sample_mask"],
    trained_dim="sequence",
    kinks=True,
    mistakes=(EVERY_SEQUENCE_COUNTS,),
    metrics=_METRICS,
    goals=_PAIRS,
    covered=_covered_preference,
)
