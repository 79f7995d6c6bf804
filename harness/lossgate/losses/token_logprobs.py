# SPDX-License-Identifier: Apache-2.0
"""Spec ``token_logprobs``: log-probabilities and entropies of single tokens, for kernels that stop short of a loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dense_losses import kept_tokens
from lossgate.dtypes import DTYPES
from lossgate.problems.batch import Batch
from lossgate.specs.coverage import TOKEN_BRANCHES, visited_tokens
from lossgate.specs.inputs import HiddenInputs, LogitsInputs
from lossgate.specs.logits import reference_logits
from lossgate.specs.option import TEMPERATURE, Between, options_of
from lossgate.specs.spec import Branch, Draft, Spec

_MARGIN = 2.0**-7
"""Nats, and probability: what the edge of a filter keeps clear of, so that rounding moves nothing across it; more in coarser dtypes."""


@dataclass(frozen=True, kw_only=True)
class TokenLogprobsOptions:
    """What a kernel of spec ``token_logprobs`` is told."""

    temperature: float = 1.0
    """Divides the logits, before they are filtered."""
    top_k: int | None = None
    """Only the k largest logits take part in the softmax; ties with the last of them too. None for all."""
    top_p: float = 1.0
    """Of those, only the most probable, until their probability reaches this. 1 for all."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; expected a positive number of tokens, or None for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected a probability in (0, 1]")


def _make_fields(draft: Draft) -> dict[str, Tensor]:
    """Which logits stay. A token whose filter has a close edge, where rounding decides, is masked."""
    o: TokenLogprobsOptions = draft.options
    kept, close = kept_logits(draft.batch, o)
    return {"kept": kept, "mask": draft.batch.fields["mask"] & ~close}


def kept_logits(batch: Batch, options: TokenLogprobsOptions) -> tuple[Tensor, Tensor]:
    """``[T, V]`` bool, which logits stay; and ``[T]`` bool, whether that hangs on rounding."""
    tempered = reference_logits(batch.leaves) / options.temperature
    coarse = batch.problem.dtype != "float32"
    margin = max(
        _MARGIN, 6 * torch.finfo(DTYPES[batch.problem.dtype]).eps * float(tempered.abs().max()) if coarse else 0.0
    )
    kept = kept_tokens(tempered, options.top_k, options.top_p)
    close = torch.zeros(len(kept), dtype=torch.bool)
    vocab = kept.shape[1]
    ordered = tempered.sort(1, descending=True).values
    if options.top_k is not None and options.top_k < vocab:
        close |= ordered[:, options.top_k - 1] - ordered[:, options.top_k] < margin
        ordered = ordered[:, : options.top_k]
    if options.top_p < 1:
        close |= (ordered.softmax(1).cumsum(1) - options.top_p).abs().amin(1) < margin
        close |= (
            (ordered[:, :-1] - ordered[:, 1:] < margin)
            & kept.sum(1, keepdim=True).eq(torch.arange(1, ordered.shape[1]))
        ).any(1)
    return kept, close


def _visited(batch: Batch) -> set[str]:
    fields = batch.fields
    of_label = fields["kept"].gather(1, fields["labels"][:, None]).squeeze(1)[fields["mask"]]
    seen = visited_tokens(batch)
    seen |= {"label filtered out"} if not of_label.all() else set()
    return seen | ({"label kept by a filter"} if bool((~fields["kept"]).any()) and bool(of_label.any()) else set())


_UNFILTERED = {"top_k": (None,)}

TOKEN_LOGPROBS = Spec(
    name="token_logprobs",
    summary="log-probabilities of the labels and entropies, with temperature and top-k / top-p filtering; no loss",
    source="NeMo-RL from_parallel_logits_to_logprobs, open-instruct tiled_token_logprobs, AReaL gather_logprobs_entropy",
    loss=None,
    options_type=TokenLogprobsOptions,
    options=options_of(
        TokenLogprobsOptions,
        {"temperature": Between(TEMPERATURE), "top_k": (None, 1, 3, 8), "top_p": (1.0, 0.9, 0.5)},
    ),
    outputs=("logprobs", "token_entropy"),
    inputs={"hidden": HiddenInputs, "logits": LogitsInputs},
    make_fields=_make_fields,
    kept="kept",
    metrics={},
    branches={
        **TOKEN_BRANCHES,
        "label filtered out": Branch(
            meaning="a trained label that top-k filters out, with log-probability -inf", barred_by=_UNFILTERED
        ),
        "label kept by a filter": Branch(
            meaning="a trained label among those that a filter keeps", barred_by=_UNFILTERED
        ),
    },
    visited=_visited,
)
