# SPDX-License-Identifier: Apache-2.0
"""The values per token that a loss may use, such as log-probabilities and entropies, and how the
reference computes each.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dense_losses import filtered_token_entropy, filtered_token_logprobs, token_entropy, token_logprobs
from lossgate.base.errors import UsageError


class TokenValues:
    """Values per token, ``[tokens]`` each. A spec names those that it ``uses``.

    All are after the soft-cap and the temperature, if a spec has them, except ``lowest`` and
    ``highest``, which are before the temperature. Heads without logits give ``logprobs`` alone.
    Reading a value that is not there raises ``AttributeError``. ``given`` has those that are there.
    """

    logprobs: Tensor
    """Log-probabilities of the labels; of the ids ``[tokens, k]`` in the field that
    ``gathered_ids`` names, if the spec has one. At heads "values" and "rewards" it holds the values
    and rewards themselves, ``[tokens]`` and ``[sequences]``."""
    entropy: Tensor
    """Entropies, in nats."""
    logsumexp: Tensor
    """Logarithms of the softmax's normaliser."""
    mean_logprob: Tensor
    """Means of the log-probabilities over the vocabulary, as label smoothing needs them."""
    lowest: Tensor
    """The smallest logit of each token, before the temperature, without a gradient."""
    highest: Tensor
    """The largest logit of each token, before the temperature, without a gradient."""
    unfiltered: Tensor
    """Log-probabilities of the labels without the filter; only where something is filtered."""
    logits: Tensor
    """``[tokens, vocab]``: the logits, for anything else that a loss computes from them."""

    def __init__(self, **given: Tensor | None) -> None:
        for name in given:
            if name not in USES:
                raise UsageError(f"TokenValues({name}=...): expected some of {', '.join(USES)}")
        self.given = {name: value for name, value in given.items() if value is not None}

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__.get("given", {})
        if name in given:
            return given[name]
        if name in USES:
            raise AttributeError(
                f"values.{name} is not there: either the spec does not name {name!r} in uses=, "
                "or the head has no logits (drop it from heads=, or look into values.given first)"
            )
        raise AttributeError(f"TokenValues has no {name!r}; there are {', '.join(USES)}")

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """The values that are there and have a gradient."""
        return {name: value for name, value in self.given.items() if name not in ("lowest", "highest")}

    def replace(self, **changed: Tensor) -> "TokenValues":
        """Returns these values with some of them replaced."""
        return TokenValues(**{**self.given, **changed})


USES = tuple(TokenValues.__annotations__)
"""The names of the values that a spec may use."""


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
        uses: the names of the values to compute.
        logits: ``[T, vocab]``, after the soft-cap, before the temperature.
        labels: ``[T]``.
        temperature: the number that divides the logits.
        ids: ``[T, k]``, the ids whose log-probabilities are ``logprobs``; None for the labels.
        logit_filter: top-k and top-p; None for no filter.
    """
    stage = _Stage(logits, labels, temperature, ids, logit_filter)
    return TokenValues(**{name: _VALUES[name](stage) for name in uses})


@dataclass(frozen=True)
class _Stage:
    """The arguments of ``token_values``."""

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
"""The function that computes each value, by its name in ``TokenValues``."""
