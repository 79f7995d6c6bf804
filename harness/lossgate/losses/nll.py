# SPDX-License-Identifier: Apache-2.0
"""Spec ``nll``: negative log-likelihood, the loss of supervised fine-tuning, and the statistics
that its runs report.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dense_losses import mean_entropy, nll, sft_statistics
from dense_losses.nll import Reduction
from lossgate.specs.coverage import TOKEN_GOALS, covered_by_mask
from lossgate.specs.inputs import HiddenHead, LogitsHead, LogprobsHead, PackedBatch
from lossgate.specs.mistakes import Mistake
from lossgate.specs.option import SOFTCAPS, TEMPERATURE, Between, options_of
from lossgate.specs.spec import FieldContext, Metric, Spec
from lossgate.specs.token_values import TokenValues


@dataclass(frozen=True, kw_only=True)
class NllOptions:
    """The options of spec ``nll``."""

    reduction: Reduction = "mean"
    """Whether the sum is divided by the trained tokens of the whole batch."""
    temperature: float = 1.0
    """Divides the logits."""
    epsilon: float = 0.0
    """Added to the number of trained tokens: 1e-8 in NeMo-RL, 1e-5 in AReaL."""
    softcap: float | None = None
    """The logits are ``softcap tanh(z / softcap)``, before the temperature. None for no cap."""


@dataclass(frozen=True, kw_only=True)
class NllBatch(PackedBatch):
    """What the spec adds to a packed batch, for its statistics.

    The loss itself needs none of it.
    """

    real: Tensor
    """``[T]`` bool: the token is no padding."""
    real_tokens: Tensor
    """Scalar int64: tokens that are no padding, of the whole batch."""
    trained_sequences: Tensor
    """Scalar int64: sequences with a trained token, of the whole batch."""


@dataclass(frozen=True, kw_only=True)
class NllHiddenInputs(HiddenHead, NllBatch):
    """The inputs at head "hidden"."""


@dataclass(frozen=True, kw_only=True)
class NllLogitsInputs(LogitsHead, NllBatch):
    """The inputs at head "logits"."""


@dataclass(frozen=True, kw_only=True)
class NllLogprobsInputs(LogprobsHead, NllBatch):
    """The inputs at head "logprobs"."""


def _loss(values: TokenValues, batch: Mapping[str, Tensor], options: NllOptions) -> tuple[Tensor, dict[str, Tensor]]:
    mask, valid_tokens = batch["mask"], batch["valid_tokens"]
    loss = nll(values.logprobs, mask, valid_tokens, options.reduction, options.epsilon)
    return loss, {} if values.entropy is None else {"entropy": mean_entropy(values.entropy, mask, valid_tokens)}


def _extra_metrics(values: TokenValues, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    nothing = torch.zeros_like(values.logprobs)
    statistics = sft_statistics(
        logprobs=values.logprobs,
        entropy=nothing if values.entropy is None else values.entropy,
        vocab_min=nothing if values.lowest is None else values.lowest,
        vocab_max=nothing if values.highest is None else values.highest,
        mask=batch["mask"],
        real=batch["real"],
        sequence=batch["sequence"],
        sequences=len(batch["lengths"]),
        valid_sequences=batch["trained_sequences"],
        real_tokens=batch["real_tokens"],
        valid_tokens=batch["valid_tokens"],
    )
    if values.entropy is None:
        return {name: value for name, value in statistics.items() if not name.startswith(("entropy", "vocab"))}
    return statistics


def _make_fields(context: FieldContext) -> dict[str, Tensor]:
    partition, mask = context.batch.partition, context.batch.fields["mask"]
    real = torch.ones(context.tokens, dtype=torch.bool)
    trained = torch.zeros(context.sequences, dtype=torch.long).index_add(0, partition.sequence_of_token, mask.long())
    return {"real": real, "real_tokens": real.sum(), "trained_sequences": (trained > 0).sum()}


def _summary(name: str, meaning: str, *, uses_entropy: bool = False) -> dict[str, Metric]:
    """Returns the metrics ``name_avg``, ``name_min`` and ``name_max``."""
    return {
        f"{name}_avg": Metric(meaning=f"mean of {meaning}", uses_entropy=uses_entropy),
        f"{name}_min": Metric(
            meaning=f"smallest of {meaning}, inf without any", reduction="min", uses_entropy=uses_entropy
        ),
        f"{name}_max": Metric(
            meaning=f"largest of {meaning}, -inf without any", reduction="max", uses_entropy=uses_entropy
        ),
    }


NLL = Spec(
    name="nll",
    summary="negative log-likelihood of the labels, over trained tokens (SFT)",
    source="NeMo-RL NLLLoss, AReaL sft_loss, torch cross_entropy",
    loss=_loss,
    extra_metrics=_extra_metrics,
    options_type=NllOptions,
    options=options_of(
        NllOptions,
        {
            "reduction": ("mean", "sum"),
            "temperature": Between(TEMPERATURE),
            "epsilon": (0.0, 1e-8, 1e-5, 0.5),
            "softcap": SOFTCAPS,
        },
    ),
    inputs={"hidden": NllHiddenInputs, "logits": NllLogitsInputs, "logprobs": NllLogprobsInputs},
    fields={"real": ("token",), "real_tokens": (), "trained_sequences": ()},
    unshifted=frozenset({"real"}),
    make_fields=_make_fields,
    metrics={
        "entropy": Metric(
            meaning="entropy of the tempered distribution, mean over trained tokens, in nats", uses_entropy=True
        ),
        "n_seqs": Metric(meaning="sequences with a trained token"),
        "n_tokens": Metric(meaning="tokens that are no padding"),
        "n_valid_tokens": Metric(meaning="trained tokens"),
        "prompt_tokens": Metric(meaning="tokens that are neither trained nor padding"),
        **_summary("ppl", "the perplexity of sequences with a trained token"),
        **_summary("loss", "the loss of trained tokens"),
        **_summary("entropy", "the entropy at trained tokens", uses_entropy=True),
        **_summary("vocab_min_logits", "the smallest logit of tokens that are no padding, before the temperature"),
        **_summary("vocab_max_logits", "the largest logit of tokens that are no padding"),
    },
    temperature="temperature",
    softcap="softcap",
    token_options=("temperature", "softcap"),
    mistakes=(
        Mistake(
            name="mask shifted by one",
            sentence="the neighbours of the trained tokens are trained in their place",
            inputs=lambda inputs: {"mask": inputs.mask.roll(1)},
        ),
    ),
    goals=TOKEN_GOALS,
    covered=covered_by_mask,
)
