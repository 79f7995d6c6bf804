# SPDX-License-Identifier: Apache-2.0
"""The reference of what losses ask of the logits."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from dense_losses import filtered_token_entropy, filtered_token_logprobs, token_entropy, token_logprobs
from lossgate.specs.token_values import TokenValues


def token_values(
    uses: Collection[str],
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    ids: Tensor | None,
    logit_filter: tuple[int | None, float] | None,
) -> TokenValues:
    """Computes values per token.

    Args:
        uses: the names of those that are wanted.
        logits: ``[T, vocab]``, after the soft-cap, before the temperature.
        labels: ``[T]``.
        temperature: the number that divides the logits.
        ids: ``[T, k]``, whose log-probabilities are wanted in place of the labels'; None for the
            labels'.
        logit_filter: top-k and top-p; None for no filter.
    """
    stage = _Stage(logits, labels, temperature, ids, logit_filter)
    return TokenValues(**{name: _VALUES[name](stage) for name in uses})


@dataclass(frozen=True)
class _Stage:
    logits: Tensor
    labels: Tensor
    temperature: float
    ids: Tensor | None
    logit_filter: tuple[int | None, float] | None

    @property
    def tempered(self) -> Tensor:
        return self.logits / self.temperature


def _logprobs(of: _Stage) -> Tensor:
    if of.ids is not None:
        return torch.log_softmax(of.tempered, -1).gather(1, of.ids)
    if of.logit_filter is not None:
        return filtered_token_logprobs(of.logits, of.labels, of.temperature, *of.logit_filter)
    return token_logprobs(of.logits, of.labels, of.temperature)


def _entropy(of: _Stage) -> Tensor:
    if of.logit_filter is not None:
        return filtered_token_entropy(of.logits, of.temperature, *of.logit_filter)
    return token_entropy(of.logits, of.temperature)


def _unfiltered(of: _Stage) -> Tensor | None:
    return None if of.logit_filter is None else token_logprobs(of.logits, of.labels, of.temperature)


_VALUES: Mapping[str, Callable[[_Stage], Tensor | None]] = MappingProxyType(
    {
        "logprobs": _logprobs,
        "entropy": _entropy,
        "logsumexp": lambda of: of.tempered.logsumexp(-1),
        "mean_logprob": lambda of: torch.log_softmax(of.tempered, -1).mean(-1),
        "lowest": lambda of: of.logits.detach().amin(-1),
        "highest": lambda of: of.logits.detach().amax(-1),
        "unfiltered": _unfiltered,
        "logits": lambda of: of.tempered,
    }
)
"""How each is computed, by its name in ``TokenValues``."""
