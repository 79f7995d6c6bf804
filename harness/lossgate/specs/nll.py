# SPDX-License-Identifier: Apache-2.0
"""Spec ``nll``: negative log-likelihood, the loss of supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dense_losses import mean_entropy, nll
from dense_losses.nll import Reduction
from lossgate.specs.base import Metric, Option, Spec, TokenValues
from lossgate.specs.branches import TOKEN_BRANCHES, visited_tokens
from lossgate.specs.inputs import HiddenInputs, LogitsInputs


@dataclass(frozen=True, kw_only=True)
class NllOptions:
    """What a kernel of spec ``nll`` is told."""

    reduction: Reduction = "mean"
    temperature: float = 1.0


def _loss(values: TokenValues, batch: Mapping[str, Tensor], options: NllOptions) -> tuple[Tensor, dict[str, Tensor]]:
    mask, valid_tokens = batch["mask"], batch["valid_tokens"]
    loss = nll(values.logprobs, mask, valid_tokens, options.reduction)
    return loss, {} if values.entropy is None else {"entropy": mean_entropy(values.entropy, mask, valid_tokens)}


NLL = Spec(
    name="nll",
    summary="negative log-likelihood of the labels, over trained tokens (SFT)",
    source="NeMo-RL NLLLoss, AReaL sft_loss, torch cross_entropy",
    loss=_loss,
    options_type=NllOptions,
    options=(
        Option(name="reduction", meaning="divide by the batch's trained tokens, or not", default="mean", choices=("mean", "sum")),
        Option(name="temperature", meaning="divides the logits", default=1.0, interval=(0.3, 3.0)),
    ),
    inputs={"hidden": HiddenInputs, "logits": LogitsInputs},
    metrics={"entropy": Metric(meaning="entropy of the tempered distribution, mean over trained tokens, in nats")},
    branches=TOKEN_BRANCHES,
    visited=visited_tokens,
)
