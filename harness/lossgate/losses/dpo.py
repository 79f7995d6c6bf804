# SPDX-License-Identifier: Apache-2.0
"""Spec ``dpo``: direct preference optimisation, on pairs of a chosen and a rejected response."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

import dense_losses
from dense_losses.preference import SigmoidLoss, sigmoid_loss, two_class_loss
from lossgate.losses.shared.pairs import PAIR_GOALS, PAIR_METRICS, PairBatch, covered_pairs
from lossgate.losses.shared.policies import below_zero, on_tokens
from lossgate.losses.shared.reference_models import draw_model, without_model
from lossgate.losses.shared.samples import EVERY_SEQUENCE_COUNTS, SAMPLES, trained_tokens
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.metric import Metric
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import TEMPERATURE, Option
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues


class DpoOptions(dense_losses.DpoOptions, Options):
    """The options of spec ``dpo``."""

    temperature: float = option(1.0, "divides the logits", between=TEMPERATURE)


class DpoBatch(PairBatch):
    """What spec ``dpo`` adds to a batch of pairs."""

    # They are shifted as the option says, not as the harness would.
    reference_logprobs: Tensor = field(
        "token",
        "log-probabilities of the labels, of the reference policy, in the layout of option reference_layout",
        unshifted=True,
    )
    reference_hidden: Tensor = field(
        "token reference_width",
        "the last hidden states of the reference model, exact in the dtype of the policy's; reference_width is 0 "
        "unless scenario reference is 'model'",
        unshifted=True,
        unused=True,
    )
    reference_weight: Tensor = field(
        "vocab reference_width",
        "the reference model's lm-head weight: its logits give reference_logprobs, without bias or temperature",
        unused=True,
    )


def _loss(
    values: TokenValues, batch: DpoBatch, options: DpoOptions, sigmoid_loss: SigmoidLoss = sigmoid_loss
) -> tuple[Tensor, dict[str, Tensor]]:
    loss, metrics = dense_losses.dpo(
        logprobs=values.logprobs,
        reference_logprobs=batch.reference_logprobs,
        mask=batch.mask,
        sequence=batch.sequence,
        sample_mask=batch.sample_mask,
        valid_sequences=batch.valid_sequences,
        options=options,
        sigmoid_loss=sigmoid_loss,
    )
    del metrics["loss"]  # the loss itself
    return loss, metrics


_REFERENCE = Option(
    name="reference",
    meaning="the reference policy: near, equal to the policy, or far off in either direction; or a model whose hidden "
    "states and weight are given, near and far",
    default="near",
    choices=("near", "far", "equal"),
    on_request=("model",),
)


def _draw_dpo(context: FieldContext) -> dict[str, Tensor]:
    tilt = on_tokens(context, context.streams.normal("reference tilt", context.sequences))
    off = context.streams.normal("reference", context.tokens) + tilt
    if context.scenario["reference"] == "model":
        far = on_tokens(context, context.streams.uniform("reference far", context.sequences) < 0.5)
        given, model = draw_model(context, context.logprobs + torch.where(far, 2.0, 0.3) * off)
    else:
        size = {"near": 0.3, "far": 2.0, "equal": 0.0}[context.scenario["reference"]]
        given, model = below_zero(context.logprobs, size * off), without_model(context)
    return {"reference_logprobs": _in_layout(given, context), **model}


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


def _covered_dpo(batch: GlobalBatch, options: DpoOptions) -> set[str]:
    samples, mask = batch.fields["sample_mask"], batch.fields["mask"]
    at_stake = torch.zeros_like(samples).index_put((batch.fields["sequence"][mask],), torch.tensor(True))
    covered = covered_pairs(samples, at_stake)
    if bool(batch.fields["sample_mask"].any()):
        _, outputs = _loss(TokenValues(logprobs=batch.policy), DpoBatch.of(batch.known), options)
        covered |= {"chosen preferred"} if outputs["accuracy"] > 0 else set()
        covered |= (
            {"rejected preferred"} if outputs["rewards_rejected_mean"] > outputs["rewards_chosen_mean"] else set()
        )
    return covered


_SWITCH = (False, True)


@spec(
    "dpo",
    summary="direct preference optimisation and IPO, with an optional SFT term",
    source="NeMo-RL DPOLossFn, TRL DPOTrainer",
    batch=DpoBatch,
    options=DpoOptions,
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
        **PAIR_METRICS,
    },
    goals=PAIR_GOALS,
    covered=_covered_dpo,
    also_written=(partial(_loss, sigmoid_loss=two_class_loss),),
)
def dpo(values: TokenValues, batch: DpoBatch, options: DpoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimisation."""
    return _loss(values, batch, options)
