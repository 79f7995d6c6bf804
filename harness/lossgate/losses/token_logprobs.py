# SPDX-License-Identifier: Apache-2.0
"""Spec ``token_logprobs``: log-probabilities and entropies of single tokens, for kernels that stop
short of a loss.
"""

from dataclasses import dataclass

from lossgate.problems.batch import GlobalBatch
from lossgate.specs.coverage import TOKEN_GOALS, covered_by_mask
from lossgate.specs.inputs import HiddenInputs, LogitsInputs
from lossgate.specs.logit_filter import FILTER_GOALS, TOP_P, FilterOptions, covered_filter_goals, filtered_values
from lossgate.specs.mistakes import fixed_option
from lossgate.specs.option import SOFTCAPS, TEMPERATURE, Between, options_of
from lossgate.specs.spec import Spec


@dataclass(frozen=True, kw_only=True)
class TokenLogprobsOptions(FilterOptions):
    """The options of spec ``token_logprobs``."""

    softcap: float | None = None
    """The logits are ``softcap tanh(z / softcap)``, before the temperature. None for no cap."""

    def __post_init__(self) -> None:
        self.check_filter()


def _covered(batch: GlobalBatch, options: TokenLogprobsOptions) -> set[str]:
    return covered_by_mask(batch, options) | covered_filter_goals(batch.fields, batch.fields["mask"])


TOKEN_LOGPROBS = Spec(
    name="token_logprobs",
    summary="log-probabilities of the labels and entropies, with temperature and top-k / top-p filtering; no loss",
    source="NeMo-RL from_parallel_logits_to_logprobs, open-instruct tiled_token_logprobs, "
    "AReaL gather_logprobs_entropy",
    loss=None,
    temperature="temperature",
    softcap="softcap",
    options_type=TokenLogprobsOptions,
    options=options_of(
        TokenLogprobsOptions,
        {"temperature": Between(TEMPERATURE), "top_k": (None, 1, 3, 8), "top_p": TOP_P, "softcap": SOFTCAPS},
    ),
    outputs=("logprobs", "token_entropy"),
    inputs={"hidden": HiddenInputs, "logits": LogitsInputs},
    token_values=filtered_values,
    token_options=("temperature", "top_k", "top_p", "softcap"),
    mistakes=(
        fixed_option("temperature", 1.0, "the temperature is ignored"),
        fixed_option("softcap", None, "the soft-cap is ignored"),
    ),
    metrics={},
    goals={**TOKEN_GOALS, **FILTER_GOALS},
    covered=_covered,
)
