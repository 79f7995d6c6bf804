# SPDX-License-Identifier: Apache-2.0
"""Spec ``label_smoothing``: negative log-likelihood, where labels share some of their weight with
the whole vocabulary.
"""

import dense_losses
from lossgate.specs.declare import spec
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import Options, option
from lossgate.specs.terms import Term, Terms
from lossgate.specs.token_values import TokenValues


class LabelSmoothingOptions(Options):
    """The options of spec ``label_smoothing``."""

    smoothing: float = option(
        0.1, "the weight that goes to the whole vocabulary, 0 to 1", choices=(0.1, 0.0, 0.3, 0.75)
    )

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"smoothing is {self.smoothing}; expected a weight in [0, 1]")


@spec(
    "label_smoothing",
    summary="negative log-likelihood with smoothed labels",
    source="Szegedy et al. 2016, section 7; torch.nn.functional.cross_entropy",
    options=LabelSmoothingOptions,
    heads=("hidden", "logits"),
    uses=("logprobs", "mean_logprob"),
)
def label_smoothing(values: TokenValues, batch: Batch, options: LabelSmoothingOptions) -> Terms:
    """Negative log-likelihood with smoothed labels."""
    nll, smooth = dense_losses.smoothed_nll(values.logprobs, values.mean_logprob, batch.mask, options.smoothing)
    return Terms(
        terms={"nll": Term(values=nll, over="trained tokens"), "smoothing": Term(values=smooth, over="trained tokens")},
        normalisers={"trained tokens": batch.valid_tokens.clamp(min=1)},
    )
