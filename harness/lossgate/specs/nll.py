# SPDX-License-Identifier: Apache-2.0
"""Spec ``nll``: negative log-likelihood, the loss of supervised fine-tuning."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dense_losses import mean_entropy, nll
from dense_losses.nll import Reduction
from lossgate.problems.batch import Batch
from lossgate.specs.base import Option, Spec, TokenValues
from lossgate.specs.inputs import HiddenInputs, LogitsInputs


@dataclass(frozen=True, kw_only=True)
class NllOptions:
    """What a kernel of spec ``nll`` is told."""

    reduction: Reduction = "mean"
    temperature: float = 1.0


def _loss(values: TokenValues, batch: Mapping[str, Tensor], options: NllOptions) -> tuple[Tensor, dict[str, Tensor]]:
    mask, valid_tokens = batch["mask"], batch["valid_tokens"]
    loss = nll(values.logprobs, mask, valid_tokens, options.reduction)
    return loss, {"entropy": mean_entropy(values.entropy, mask, valid_tokens)}


def _visited(batch: Batch) -> set[str]:
    mask = batch.fields["mask"]
    trained = batch.fields["labels"][mask]
    seen = {"trained token"} if mask.any() else set[str]()
    seen |= {"masked token"} if not mask[batch.partition.real_tokens].all() else set()
    for shard in batch.partition.vocab_shards:
        own = trained[(trained >= shard.start) & (trained < shard.end)]
        if shard.start < shard.end and bool((own == shard.start).any()):
            seen.add("label on a shard's first row")
        if shard.start < shard.end and bool((own == shard.end - 1).any()):
            seen.add("label on a shard's last row")
    return seen


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
    metrics={"entropy": "entropy of the tempered distribution, mean over trained tokens, in nats"},
    branches={
        "trained token": "a token whose label is trained",
        "masked token": "a token whose label is not",
        "label on a shard's first row": "a trained label on the first row of a tp rank's vocabulary",
        "label on a shard's last row": "a trained label on the last row of a tp rank's vocabulary",
    },
    visited=_visited,
)
