# SPDX-License-Identifier: Apache-2.0
"""Spec ``dpo``: direct preference optimisation, on pairs of a chosen and a rejected response."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

import dense_losses
from dense_losses.preference import LossType, ReferenceLayout, SigmoidLoss, sigmoid_loss, two_class_loss
from lossgate.losses.shared.policy_gradients import below_zero, on_tokens
from lossgate.losses.shared.sequences import (
    PAIR_GOALS,
    PAIR_METRICS,
    SAMPLES,
    PairBatch,
    covered_pairs,
    trained_tokens,
)
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.declare import spec
from lossgate.specs.field_context import FieldContext
from lossgate.specs.option import TEMPERATURE, Option
from lossgate.specs.outputs import Metric
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues


class DpoOptions(Options):
    """The options of spec ``dpo``; names and defaults are NeMo-RL's where it has them.

    Raises:
        ValueError: if an option is out of range, or beta is 0 for IPO.
    """

    reference_policy_kl_penalty: float = option(
        0.05,
        "beta, in 1 / nat: how strongly the loss holds the policy to the reference. beta in TRL",
        choices=(0.05, 0.5, 0.1),
    )
    preference_loss_weight: float = option(1.0, "the factor of the preference loss", choices=(1.0, 0.5))
    sft_loss_weight: float = option(
        0.0, "the factor of the NLL of the chosen responses. At 0 the NLL is not evaluated", choices=(0.0, 1.0, 0.25)
    )
    preference_average_log_probs: bool = option(
        False,
        "rewards are means over the trained tokens of a sequence, not sums. TRL does so for IPO only",
    )
    sft_average_log_probs: bool = option(
        False,
        "the NLL of a chosen response is the mean over its trained tokens, not their sum",
    )
    loss_type: LossType = option(
        "sigmoid", '"sigmoid" is DPO, "ipo" is IPO. NeMo-RL has only DPO', choices=("sigmoid", "ipo")
    )
    reference_layout: ReferenceLayout = option(
        "next",
        'which prediction each of the reference\'s log-probabilities belongs to: "next" is that of the next '
        'token, "token" that of the token itself, and "rolled" is "token" rolled left by one',
        choices=("next", "token", "rolled"),
    )
    epsilon: float = option(
        0.0,
        "added to the number of pairs, which divides the loss and the metrics; 1e-8 in NeMo-RL",
        choices=(0.0, 1e-8, 0.5),
    )
    temperature: float = option(1.0, "divides the logits", between=TEMPERATURE)

    def __post_init__(self) -> None:
        for name in ("reference_policy_kl_penalty", "preference_loss_weight", "sft_loss_weight", "epsilon"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a finite number, 0 or larger")
        for name, choices in (("loss_type", ("sigmoid", "ipo")), ("reference_layout", ("next", "token", "rolled"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")
        if self.loss_type == "ipo" and self.reference_policy_kl_penalty == 0:
            raise ValueError(
                "reference_policy_kl_penalty is 0; expected a positive number, because loss_type 'ipo' has the target "
                "1 / (2 beta); or choose loss_type 'sigmoid'"
            )


class DpoBatch(PairBatch):
    """The fields that spec ``dpo`` adds to a batch of pairs."""

    # It is unshifted for lossgate, because option reference_layout says how it is shifted.
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
        given, model = _draw_model(context, context.logprobs + torch.where(far, 2.0, 0.3) * off)
    else:
        size = {"near": 0.3, "far": 2.0, "equal": 0.0}[context.scenario["reference"]]
        given, model = below_zero(context.logprobs, size * off), _without_model(context)
    return {"reference_logprobs": _in_layout(given, context), **model}


# Some kernels compute the log-probabilities of a reference model themselves. Each row of its weight
# has a single 1, so that its logits are entries of the hidden states, exactly, in any dtype. So
# kernels round its log-probabilities no more than a softmax in float32 does.

_LEAST = -30.0
"""The least log-probability that the model should give."""
_BELOW = 0.1
"""Nats by which the model's log-probability of a label stays below the largest that it can give."""


def _without_model(context: FieldContext) -> dict[str, Tensor]:
    """Returns hidden states and a weight of width 0."""
    return {
        "reference_hidden": context.streams.normal("", context.tokens, 0),
        "reference_weight": context.streams.normal("", context.vocab, 0),
    }


def _draw_model(context: FieldContext, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Draws a reference model.

    Args:
        context: of the problem.
        wanted: ``[T]``, the log-probabilities of the labels that it should nearly give. If its
            hidden states are narrower than the vocabulary, labels share logits with other tokens,
            and are less likely.

    Returns:
        The log-probabilities that it gives, and the two fields: ``[T, width]`` and
        ``[vocab, width]``.
    """
    hidden = context.batch.leaves.get("hidden")
    width = 8 if hidden is None else hidden.shape[1]
    column = context.streams.integers("reference columns", width, context.vocab)
    sharing = torch.bincount(column, minlength=width).double()
    states = context.streams.normal("reference hidden", context.tokens, width)
    own = column[context.labels][:, None]
    others, alike = states.scatter(1, own, -torch.inf), sharing[own.squeeze(1)]
    given = _logit_of(wanted.clamp(min=_LEAST), others, sharing, alike)
    # If all rows share one column, any logit gives the same log-probabilities.
    states = states.scatter(1, own, torch.where(given.isfinite(), given, 0.0)[:, None])
    states = states.to(context.batch.leaf_dtype).double()
    logprobs = states.gather(1, own).squeeze(1) - (states + sharing.log()).logsumexp(1)
    weight = torch.nn.functional.one_hot(column, width).double()
    return logprobs, {"reference_hidden": states, "reference_weight": weight}


def _logit_of(wanted: Tensor, others: Tensor, sharing: Tensor, alike: Tensor) -> Tensor:
    """Returns the logit that gives a label a log-probability, ``[T]``.

    Args:
        wanted: the log-probability.
        others: ``[T, width]``, the logits of all columns, and -inf for that of the label.
        sharing: ``[width]``, how many rows of the vocabulary have each column.
        alike: ``[T]``, how many rows have the label's column.
    """
    wanted = torch.minimum(wanted, -alike.log() - _BELOW)
    return wanted + (others + sharing.log()).logsumexp(1) - torch.log1p(-alike * wanted.exp())


def _in_layout(values: Tensor, context: FieldContext) -> Tensor:
    """Moves values from the alignment of the labels to that of the option, within each sequence."""
    layout = context.options.reference_layout
    if layout == "next":
        return values
    shifted = values.clone()
    for start, end in pairwise(context.batch.partition.starts):
        if start == end:
            continue
        part = values[start:end]
        if layout == "token":
            shifted[start:end] = torch.cat([part.new_zeros(1), part[:-1]])
        else:
            shifted[start:end] = torch.cat([part[:-1], part[:1]])  # rolled round from the start
    return shifted


def _covered_dpo(batch: GlobalBatch, options: DpoOptions) -> set[str]:
    samples, mask = batch.fields["sample_mask"], batch.fields["mask"]
    at_stake = torch.zeros_like(samples).index_put((batch.fields["sequence"][mask],), torch.tensor(True))
    covered = covered_pairs(samples, at_stake)
    if samples.any():
        _, metrics = _loss(TokenValues(logprobs=batch.policy), DpoBatch.of(batch.known), options)
        if metrics["accuracy"] > 0:
            covered.add("chosen preferred")
        if metrics["rewards_rejected_mean"] > metrics["rewards_chosen_mean"]:
            covered.add("rejected preferred")
    return covered


@spec(
    "dpo",
    summary="direct preference optimisation and IPO, with an optional SFT term",
    source="NeMo-RL DPOLossFn, TRL DPOTrainer",
    batch=DpoBatch,
    options=DpoOptions,
    heads=("hidden", "logits", "logprobs"),
    temperature="temperature",
    draw=_draw_dpo,
    scenarios=(_REFERENCE, SAMPLES),
    group_size=2,
    trained=trained_tokens,
    kinks=True,
    tie_scenarios={"reference": "equal"},  # only the accuracy compares
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
