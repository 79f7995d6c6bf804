# SPDX-License-Identifier: Apache-2.0
"""Spec ``token_logprobs``: log-probabilities and entropies of single tokens, for kernels that stop
short of a loss.
"""

from lossgate.specs.declare import spec
from lossgate.specs.logit_filter import FilterOptions
from lossgate.specs.option import SOFTCAPS
from lossgate.specs.packed_batch import Batch
from lossgate.specs.record import option
from lossgate.specs.token_values import TokenValues


class TokenLogprobsOptions(FilterOptions):
    """The options of spec ``token_logprobs``."""

    softcap: float | None = option(
        None,
        "the logits are softcap tanh(z / softcap), before the temperature. None for no cap",
        choices=SOFTCAPS,
    )

    def __post_init__(self) -> None:
        self.check_filter()


@spec(
    "token_logprobs",
    summary="log-probabilities of the labels and entropies, with temperature and top-k / top-p filtering; no loss",
    source="NeMo-RL from_parallel_logits_to_logprobs, open-instruct tiled_token_logprobs, "
    "AReaL gather_logprobs_entropy",
    options=TokenLogprobsOptions,
    choices={"top_k": (None, 1, 3, 8)},
    heads=("hidden", "logits"),
    uses=("logprobs", "entropy"),
    softcap="softcap",
    outputs=("logprobs", "token_entropy"),
)
def token_logprobs(values: TokenValues, batch: Batch, options: TokenLogprobsOptions) -> None:
    """There is no loss: the values per token themselves are compared."""
