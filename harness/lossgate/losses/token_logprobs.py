# SPDX-License-Identifier: Apache-2.0
"""Spec ``token_logprobs``: log-probabilities and entropies of single tokens, for kernels that stop
short of a loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dense_losses import filtered_token_entropy, filtered_token_logprobs, kept_tokens
from lossgate.numerics.float_formats import TORCH_DTYPES
from lossgate.problems.batch import GlobalBatch
from lossgate.specs.coverage import TOKEN_GOALS, CoverageGoal, covered_by_mask
from lossgate.specs.inputs import HiddenInputs, LogitsInputs
from lossgate.specs.mistakes import fixed_option
from lossgate.specs.option import TEMPERATURE, Between, options_of
from lossgate.specs.spec import FieldContext, Spec
from lossgate.specs.token_values import TokenValues, logit_range

_MARGIN = 2.0**-7
"""Nats, and probability: what the edge of a filter keeps clear of, so that rounding moves nothing
across it; more in coarser dtypes."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobsOptions:
    """The options of spec ``token_logprobs``."""

    temperature: float = 1.0
    """Divides the logits, before they are filtered."""
    top_k: int | None = None
    """Only the k largest logits take part in the softmax; ties with the last of them too. None for
    all."""
    top_p: float = 1.0
    """Of those, only the most probable, until their probability reaches this. 1 for all."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; expected a positive number of tokens, or None for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected a probability in (0, 1]")


def _token_values(logits: Tensor, fields: Mapping[str, Tensor], options: TokenLogprobsOptions) -> TokenValues:
    filter_ = (options.temperature, options.top_k, options.top_p)
    return TokenValues(
        logprobs=filtered_token_logprobs(logits, fields["labels"], *filter_),
        entropy=filtered_token_entropy(logits, *filter_),
        **logit_range(logits),
    )


def _make_fields(context: FieldContext) -> dict[str, Tensor]:
    """Computes which logits stay.

    A token for which rounding could decide that otherwise is masked.
    """
    o: TokenLogprobsOptions = context.options
    passing, close = passing_logits(context.logits(), context.batch.dtype, o)
    return {"logit_filter": passing, "mask": context.batch.fields["mask"] & ~close}


def passing_logits(logits: Tensor, dtype: str, options: TokenLogprobsOptions) -> tuple[Tensor, Tensor]:
    """Returns ``[T, V]`` bool, which logits stay; and ``[T]`` bool, whether rounding could decide
    it otherwise.
    """
    tempered = logits / options.temperature
    coarse = dtype != "float32"
    margin = max(_MARGIN, 6 * torch.finfo(TORCH_DTYPES[dtype]).eps * float(tempered.abs().max()) if coarse else 0.0)
    passing = kept_tokens(tempered, options.top_k, options.top_p)
    close = torch.zeros(len(passing), dtype=torch.bool)
    vocab = passing.shape[1]
    ordered = tempered.sort(1, descending=True).values
    if options.top_k is not None and options.top_k < vocab:
        close |= ordered[:, options.top_k - 1] - ordered[:, options.top_k] < margin
        ordered = ordered[:, : options.top_k]
    if options.top_p < 1:
        close |= (ordered.softmax(1).cumsum(1) - options.top_p).abs().amin(1) < margin
        close |= (
            (ordered[:, :-1] - ordered[:, 1:] < margin)
            & passing.sum(1, keepdim=True).eq(torch.arange(1, ordered.shape[1]))
        ).any(1)
    return passing, close


def _covered(batch: GlobalBatch, options: TokenLogprobsOptions) -> set[str]:
    fields = batch.fields
    of_label = fields["logit_filter"].gather(1, fields["labels"][:, None]).squeeze(1)[fields["mask"]]
    covered = covered_by_mask(batch, options)
    covered |= {"label filtered out"} if not of_label.all() else set()
    return covered | (
        {"label kept by a filter"} if bool((~fields["logit_filter"]).any()) and bool(of_label.any()) else set()
    )


_UNFILTERED = {"top_k": (None,)}

TOKEN_LOGPROBS = Spec(
    name="token_logprobs",
    summary="log-probabilities of the labels and entropies, with temperature and top-k / top-p filtering; no loss",
    source="NeMo-RL from_parallel_logits_to_logprobs, open-instruct tiled_token_logprobs, "
    "AReaL gather_logprobs_entropy",
    loss=None,
    temperature="temperature",
    options_type=TokenLogprobsOptions,
    options=options_of(
        TokenLogprobsOptions,
        {"temperature": Between(TEMPERATURE), "top_k": (None, 1, 3, 8), "top_p": (1.0, 0.9, 0.5)},
    ),
    outputs=("logprobs", "token_entropy"),
    inputs={"hidden": HiddenInputs, "logits": LogitsInputs},
    make_fields=_make_fields,
    token_values=_token_values,
    logit_filter="logit_filter",
    mistakes=(fixed_option("temperature", 1.0, "the temperature is ignored"),),
    metrics={},
    goals={
        **TOKEN_GOALS,
        "label filtered out": CoverageGoal(
            meaning="a trained label that top-k filters out, with log-probability -inf", unreachable_if=_UNFILTERED
        ),
        "label kept by a filter": CoverageGoal(
            meaning="a trained label among those that a filter keeps", unreachable_if=_UNFILTERED
        ),
    },
    covered=_covered,
)
