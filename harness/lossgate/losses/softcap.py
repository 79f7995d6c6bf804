# SPDX-License-Identifier: Apache-2.0
"""Spec ``softcap``: negative log-likelihood of soft-capped logits.

Spec ``nll`` has the same loss as an option. This one uses the logits themselves, and so shows how
well the judge sees errors in a loss about which it knows nothing.
"""

import torch
from torch import Tensor

import dense_losses
from lossgate.specs.declare import spec
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, option
from lossgate.specs.token_values import TokenValues


class SoftcapOptions(Options):
    """The options of spec ``softcap``."""

    softcap: float = option(30.0, "the logits are softcap tanh(z / softcap)", choices=(30.0, 2.0))

    def __post_init__(self) -> None:
        if not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; expected a number above 0")


@spec(
    "softcap",
    summary="negative log-likelihood of soft-capped logits",
    source="Gemma 2 (arXiv 2408.00118)",
    options=SoftcapOptions,
    heads=("hidden", "logits"),
    uses=("logits",),
)
def softcap(values: TokenValues, batch: Batch, options: SoftcapOptions) -> Tensor:
    """Negative log-likelihood of soft-capped logits."""
    rows = torch.where(batch.mask[:, None], values.logits, 0.0)
    logprobs = dense_losses.token_logprobs(dense_losses.softcapped(rows, options.softcap), batch.labels)
    return dense_losses.nll(logprobs, batch.mask, batch.valid_tokens)
