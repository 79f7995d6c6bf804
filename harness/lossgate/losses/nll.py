# SPDX-License-Identifier: Apache-2.0
"""Spec ``nll``: negative log-likelihood, the loss of supervised fine-tuning, and the statistics
that its runs report.
"""

import torch
from torch import Tensor

import dense_losses
from dense_losses.nll import Reduction
from lossgate.specs.declare import spec
from lossgate.specs.option import SOFTCAPS, TEMPERATURE
from lossgate.specs.outputs import Metric
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, field, option
from lossgate.specs.token_values import TokenValues


class NllOptions(Options):
    """The options of spec ``nll``."""

    reduction: Reduction = option(
        "mean", "whether the sum is divided by the trained tokens of the whole batch", choices=("mean", "sum")
    )
    temperature: float = option(1.0, "divides the logits", between=TEMPERATURE)
    epsilon: float = option(
        0.0,
        "added to the number of trained tokens: 1e-8 in NeMo-RL, 1e-5 in AReaL",
        choices=(0.0, 1e-8, 1e-5, 0.5),
    )
    softcap: float | None = option(
        None,
        "the logits are softcap tanh(z / softcap), before the temperature. None for no cap",
        choices=SOFTCAPS,
    )


class NllBatch(Batch):
    """The fields that the spec adds to a packed batch, for its statistics.

    The loss itself does not need them.
    """

    real: Tensor = field("token", "the token is no padding", dtype="bool", unshifted=True, draw=lambda c: c.coin(1.0))
    real_tokens: Tensor = field(
        "", "tokens that are no padding, of the whole batch", dtype="int64", count=lambda batch: batch.real.sum()
    )
    trained_sequences: Tensor = field(
        "",
        "sequences with a trained token, of the whole batch",
        dtype="int64",
        count=lambda batch: (_trained_tokens(batch) > 0).sum(),
    )


def _trained_tokens(batch: Batch) -> Tensor:
    """Returns ``[sequences]``: how many trained tokens each sequence has."""
    return torch.zeros(batch.sequences, dtype=torch.long).index_add(0, batch.sequence, batch.mask.long())


def _extra_metrics(values: TokenValues, batch: NllBatch, options: NllOptions) -> dict[str, Tensor]:
    given, nothing = values.given, torch.zeros_like(values.logprobs)
    statistics = dense_losses.sft_statistics(
        logprobs=values.logprobs,
        entropy=given.get("entropy", nothing),
        vocab_min=given.get("lowest", nothing),
        vocab_max=given.get("highest", nothing),
        mask=batch.mask,
        real=batch.real,
        sequence=batch.sequence,
        sequences=batch.sequences,
        valid_sequences=batch.trained_sequences,
        real_tokens=batch.real_tokens,
        valid_tokens=batch.valid_tokens,
    )
    if "entropy" not in given:  # head "logprobs"
        return {name: value for name, value in statistics.items() if not name.startswith(("entropy", "vocab"))}
    return statistics


def _summary(name: str, meaning: str) -> dict[str, Metric]:
    """Returns the metrics ``name_avg``, ``name_min`` and ``name_max``."""
    return {
        f"{name}_avg": Metric(meaning=f"mean of {meaning}"),
        f"{name}_min": Metric(meaning=f"smallest of {meaning}, inf without any", reduction="min"),
        f"{name}_max": Metric(meaning=f"largest of {meaning}, -inf without any", reduction="max"),
    }


@spec(
    "nll",
    summary="negative log-likelihood of the labels, over trained tokens (SFT)",
    source="NeMo-RL NLLLoss, AReaL sft_loss, torch cross_entropy",
    batch=NllBatch,
    options=NllOptions,
    heads=("hidden", "logits", "logprobs"),
    uses=("logprobs", "entropy", "lowest", "highest"),
    temperature="temperature",
    softcap="softcap",
    extra_metrics=_extra_metrics,
    metrics={
        "entropy": Metric(meaning="entropy of the tempered distribution, mean over trained tokens, in nats"),
        "n_seqs": Metric(meaning="sequences with a trained token"),
        "n_tokens": Metric(meaning="tokens that are no padding"),
        "n_valid_tokens": Metric(meaning="trained tokens"),
        "prompt_tokens": Metric(meaning="tokens that are neither trained nor padding"),
        **_summary("ppl", "the perplexity of sequences with a trained token"),
        **_summary("loss", "the loss of trained tokens"),
        **_summary("entropy", "the entropy at trained tokens"),
        **_summary("vocab_min_logits", "the smallest logit of tokens that are no padding, before the temperature"),
        **_summary("vocab_max_logits", "the largest logit of tokens that are no padding"),
    },
)
def nll(values: TokenValues, batch: NllBatch, options: NllOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the labels."""
    mask, valid_tokens = batch.mask, batch.valid_tokens
    loss = dense_losses.nll(values.logprobs, mask, valid_tokens, options.reduction, options.epsilon)
    if "entropy" not in values.given:  # head "logprobs"
        return loss, {}
    return loss, {"entropy": dense_losses.mean_entropy(values.entropy, mask, valid_tokens)}
