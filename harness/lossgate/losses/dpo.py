# SPDX-License-Identifier: Apache-2.0
"""Specs ``dpo`` and ``preference``: losses on pairs of a chosen and a rejected response."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dense_losses import DpoOptions, dpo, preference
from lossgate.losses.policies import of_tokens, sample_mask
from lossgate.losses.scenarios import SAMPLES
from lossgate.problems.batch import Batch
from lossgate.problems.partition import Dims
from lossgate.specs.coverage import TOKEN_BRANCHES, visited_tokens
from lossgate.specs.inputs import HiddenHead, LogitsHead, LogprobsHead, PackedBatch, RewardsHead
from lossgate.specs.option import TEMPERATURE, Between, options_of
from lossgate.specs.spec import Branch, Draft, Metric, Option, Spec, TokenValues


@dataclass(frozen=True, kw_only=True)
class DpoSpecOptions(DpoOptions):
    """What a kernel of spec ``dpo`` is told."""

    temperature: float = 1.0
    """Divides the logits."""


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """What a kernel of spec ``preference`` is told."""

    epsilon: float = 0.0
    """Added to the number of pairs that the loss and the metrics are divided by: 1e-8 in NeMo-RL."""


@dataclass(frozen=True, kw_only=True)
class PairBatch(PackedBatch):
    """What both specs add to a packed batch: sequences 2p and 2p + 1 are the chosen and the rejected one of pair p, on one dp rank.

    S is the number of this dp rank's sequences.
    """

    sample_mask: Tensor
    """``[S]`` bool: the sequence counts. That of the chosen one decides about the pair. ``mask`` is the token mask alone."""
    valid_sequences: Tensor
    """Scalar int64: sequences that count, of the whole batch; twice the pairs that losses and metrics are divided by."""


@dataclass(frozen=True, kw_only=True)
class DpoBatch(PairBatch):
    """What ``dpo`` adds."""

    reference_logprobs: Tensor
    """``[T]``, of the reference policy, in the layout that the option ``reference_layout`` names."""


@dataclass(frozen=True, kw_only=True)
class DpoHiddenInputs(HiddenHead, DpoBatch):
    """Head "hidden"."""


@dataclass(frozen=True, kw_only=True)
class DpoLogitsInputs(LogitsHead, DpoBatch):
    """Head "logits"."""


@dataclass(frozen=True, kw_only=True)
class DpoLogprobsInputs(LogprobsHead, DpoBatch):
    """Head "logprobs"."""


@dataclass(frozen=True, kw_only=True)
class PreferenceInputs(RewardsHead, PairBatch):
    """Head "rewards"."""


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


def _make_dpo_fields(draft: Draft) -> dict[str, Tensor]:
    size = {"near": 0.3, "far": 2.0, "equal": 0.0}[draft.scenario["reference"]]
    tilt = of_tokens(draft, draft.bits.normal("reference tilt", draft.sequences))
    near = draft.logprobs + size * (draft.bits.normal("reference", draft.tokens) + tilt)
    return _make_pair_fields(draft) | {"reference_logprobs": _laid_out(near, draft)}


def _make_pair_fields(draft: Draft) -> dict[str, Tensor]:
    """A pair counts whole or not at all: what an original does otherwise is a matter of its own."""
    samples = sample_mask(draft)
    return {"sample_mask": samples[0::2].repeat_interleave(2)}


def _laid_out(values: Tensor, draft: Draft) -> Tensor:
    """From the alignment of the labels to that of the option; sequences are shifted in their padded length."""
    if draft.options.reference_layout == "next":
        return values
    shifted, starts = values.clone(), draft.batch.partition.starts
    for start, end in pairwise(starts):
        part = values[start:end]
        if draft.options.reference_layout == "token" and end > start:
            shifted[start:end] = torch.cat([part.new_zeros(1), part[:-1]])
        elif end > start:
            shifted[start:end] = torch.cat([part[:-1], part[:1]])  # rolled round from the start
    return shifted


def _visited_pairs(batch: Batch) -> set[str]:
    samples = batch.fields["sample_mask"]
    seen = {"pair that counts"} if samples.any() else set[str]()
    return seen | ({"pair that does not count"} if not samples.all() else set())


def _visited_dpo(batch: Batch) -> set[str]:
    options, fields = DPO.make_options(batch.problem.options), batch.fields
    outputs = _dpo_loss(TokenValues(logprobs=batch.policy, entropy=None), fields, options)[1]
    seen = visited_tokens(batch) | _visited_pairs(batch)
    if bool(fields["sample_mask"].any()):
        seen |= {"chosen preferred"} if outputs["accuracy"] > 0 else set()
        seen |= {"rejected preferred"} if outputs["rewards_rejected_mean"] > outputs["rewards_chosen_mean"] else set()
    return seen


def _visited_preference(batch: Batch) -> set[str]:
    rewards = batch.leaves["rewards"] * batch.fields["sample_mask"]
    seen = _visited_pairs(batch)
    seen |= {"chosen preferred"} if bool((rewards[0::2] > rewards[1::2]).any()) else set()
    return seen | ({"rejected preferred"} if bool((rewards[0::2] < rewards[1::2]).any()) else set())


_METRICS = {
    "accuracy": Metric(meaning="share of pairs whose chosen sequence has the larger reward"),
    "rewards_chosen_mean": Metric(meaning="mean reward of chosen sequences, in nats, without beta"),
    "rewards_rejected_mean": Metric(meaning="mean reward of rejected sequences"),
    "num_valid_samples": Metric(meaning="pairs that count"),
}
_PAIRS = {
    "pair that counts": Branch(meaning="a pair of sequences that the sample mask keeps"),
    "pair that does not count": Branch(meaning="a pair of sequences that the sample mask leaves out"),
    "chosen preferred": Branch(meaning="a pair whose chosen sequence has the larger reward"),
    "rejected preferred": Branch(meaning="a pair whose rejected sequence has the larger reward"),
}
_PAIR_FIELDS: Mapping[str, Dims] = {"sample_mask": ("sequence",), "valid_sequences": ()}
_SWITCH = (False, True)

DPO = Spec(
    name="dpo",
    summary="direct preference optimisation and IPO, with an optional SFT term",
    source="NeMo-RL DPOLossFn, TRL DPOTrainer",
    loss=_dpo_loss,
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
    make_fields=_make_dpo_fields,
    scenario=(_REFERENCE, SAMPLES),
    together=2,
    kinks=True,
    ties={"reference": "equal"},  # only the accuracy compares
    metrics={
        "sft_loss": Metric(meaning="the SFT term before its weight"),
        "preference_loss": Metric(meaning="the preference term before its weight"),
        **_METRICS,
    },
    branches={**TOKEN_BRANCHES, **_PAIRS},
    visited=_visited_dpo,
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
    scenario=(SAMPLES,),
    together=2,
    kinks=True,
    metrics=_METRICS,
    branches=_PAIRS,
    visited=_visited_preference,
)
